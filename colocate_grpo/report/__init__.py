"""The experiment report: what a run did, computed from what it wrote down."""
