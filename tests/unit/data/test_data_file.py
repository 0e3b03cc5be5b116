"""Rows of data files as users have them, and every way in which one can be broken."""

from __future__ import annotations

import pyarrow
import pyarrow.parquet
import pytest

from colocate_grpo.data_file import BrokenRow, Row, good_rows, read_rows
from colocate_grpo.errors import DataError


@pytest.mark.parametrize(
    ("label", "text", "kind"),
    [
        ("34", "34", "integer"),
        (34, "34", "integer"),
        (27.0, "27", "integer"),
        (-3, "-3", "integer"),
        (0.5, "0.5", "decimal"),
        (10**400, "1" + "0" * 400, "integer"),
        ("  \\frac{1}{2} ", "\\frac{1}{2}", "text"),
        ("1,234", "1,234", "integer"),
        ("½", "½", "text"),
    ],
)
def test_a_label_is_text_or_a_number(write, label, text, kind):
    (row,) = good_rows(write({"prompt": "q", "label": label}))
    assert (row.label, row.label_kind) == (text, kind)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{not json", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
        (b'{"prompt": "q", "label": "1"', "not JSON"),
        (b'"just text"', "a text, expected an object"),
        (b"[1, 2]", "a list, expected an object"),
        (b'{"prompt": "\xff", "label": "1"}', "not UTF-8 (byte 13)"),
        (rb'{"prompt": "\ud83d", "label": "1"}', "half a surrogate pair"),
        (rb'{"prompt": "q", "label": "\udc00"}', "half a surrogate pair"),
        (b'{"prompt": "q", "label": ' + b"9" * 5000 + b"}", "not readable (Exceeds the limit"),
        (b"[" * 200_000, "not readable"),
        (b'{"prompt": "q"}', "no label (keys: prompt; expected label or answer)"),
        (b'{"prompt": "q", "label": null}', "no label"),
        (b'{"prompt": "q", "label": " "}', "the label is empty"),
        (b'{"prompt": "q", "label": NaN}', "the label is nan, expected a finite number"),
        (b'{"prompt": "q", "label": 1e999}', "the label is inf"),
        (b'{"prompt": "q", "label": true}', "the label is True, expected text or a number"),
        (b'{"prompt": "q", "label": ["1"]}', "the label is ['1'], expected text or a number"),
        (b'{"question": "q", "label": "1"}', "no prompt (keys: question, label; expected prompt or problem)"),
        (b'{"prompt": " \\n", "label": "1"}', "the prompt is empty"),
        (b'{"prompt": 5, "label": "1"}', "the prompt is 5, expected text or a list of messages"),
        (b'{"prompt": [], "label": "1"}', "the prompt is [], expected"),
        (b'{"prompt": [{"role": "user"}], "label": "1"}', "a message of the prompt needs a `role` and a `content`"),
        (b'{"prompt": [{"role": "system", "content": "s"}], "label": "1"}', "no message of the prompt has the role"),
    ],
)
def test_a_broken_line_is_named_with_its_number(write, line, reason):
    path = write({"prompt": "good", "label": 1}, b"", line, {"prompt": "good too", "label": 2})
    rows = list(read_rows(path))
    assert [type(row) for row in rows] == [Row, BrokenRow, Row]
    assert rows[1].line == 3
    assert rows[1].reason.startswith(reason)
    assert rows[2].line == 4
    with pytest.raises(DataError, match=r"data\.jsonl: 1 broken line: line 3: "):
        good_rows(path)


def test_many_broken_lines_are_one_line_of_text(write):
    path = write(*[b"?"] * 12)
    with pytest.raises(DataError) as error:
        good_rows(path)
    message = str(error.value)
    assert "12 broken lines" in message
    assert message.endswith("; and 7 more")
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_an_error(write, content):
    with pytest.raises(DataError, match="empty data file"):
        good_rows(write(content))


def test_a_missing_file_names_its_neighbour(write):
    path = write({"prompt": "q", "label": 1}, name="train.jsonl")
    with pytest.raises(DataError, match=r"no such data file \(did you mean train\.jsonl\?\)"):
        good_rows(path.with_name("trian.jsonl"))


def test_an_unknown_kind_of_file(write):
    with pytest.raises(DataError, match=r"'\.csv' \(allowed: \.jsonl, \.parquet\)"):
        good_rows(write({"prompt": "q", "label": 1}, name="data.csv"))


def test_byte_order_mark_windows_line_ends_and_unusual_separators(write):
    text = "line\u2028separator \U0001d54f é"
    path = write(b"\xef\xbb\xbf" + b'{"problem": "q", "answer": "1"}\r', {"problem": text, "answer": "2"})
    assert [(r.prompt, r.label) for r in good_rows(path)] == [("q", "1"), (text, "2")]


def test_keys_can_be_named_and_dotted(write):
    path = write({"question": "q", "prompt": "other", "reward_model": {"ground_truth": 7}, "source": "verl"})
    (row,) = good_rows(path, "question", "reward_model.ground_truth")
    assert (row.prompt, row.label) == ("q", "7")
    assert row.metadata["source"] == "verl"
    with pytest.raises(DataError, match=r"no label under 'reward_model\.truth'"):
        good_rows(path, "question", "reward_model.truth")
    with pytest.raises(DataError, match=r"no prompt under 'questoin' .*\(did you mean question\?\)"):
        good_rows(path, "questoin", "reward_model.ground_truth")


def test_parquet_gives_the_rows_of_jsonl(tmp_path, write):
    rows = [
        {"prompt": [{"role": "user", "content": f"what is {i}?"}], "label": float(i), "source": "x"} for i in range(70)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet", row_group_size=16)
    assert good_rows(tmp_path / "data.parquet") == good_rows(write(*rows))


def test_a_parquet_row_without_label_has_its_number(tmp_path):
    rows = [{"prompt": "a", "label": 1}, {"prompt": "b", "label": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    with pytest.raises(DataError, match="line 2: no label"):
        good_rows(tmp_path / "data.parquet")


def test_a_damaged_parquet_file(tmp_path):
    (tmp_path / "data.parquet").write_bytes(b"PAR1 this is not one")
    with pytest.raises(DataError, match="not a readable parquet file"):
        good_rows(tmp_path / "data.parquet")
