"""The demo: a tiny real language model that adds, taught by a careless teacher."""
