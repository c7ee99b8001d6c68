"""Reading and writing configuration text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from roll.config.document import _Loader, dump, parse, read
from roll.errors import ConfigError


def value_of(text: str) -> object:
    return parse(f"key: {text}", "file.yaml")[0]["key"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("2.5e3", 2500.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1_000", 1000),
        ("-3", -3),
        ("010", 10),
        ("0o17", 15),
        ("0x1f", 31),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("yes", "yes"),
        ("off", "off"),
        ("2026-01-01", "2026-01-01"),
        ("1:30", "1:30"),
        ("'8'", "8"),
        ("[+, -]", ["+", "-"]),
        ("{a: 1}", {"a": 1}),
    ],
)
def test_config_document_scalars_are_those_of_yaml_1_2(text, expected):
    value = value_of(text)
    assert value == expected
    assert type(value) is type(expected)


def test_config_document_every_key_and_list_entry_has_its_line():
    _, origins = parse("a: 1\nb:\n  c: 2\n  d:\n    - x\n    - y: 3\n", "f.yaml")
    assert origins == {
        ("a",): "f.yaml:1",
        ("b",): "f.yaml:2",
        ("b", "c"): "f.yaml:3",
        ("b", "d"): "f.yaml:4",
        ("b", "d", 0): "f.yaml:5",
        ("b", "d", 1): "f.yaml:6",
        ("b", "d", 1, "y"): "f.yaml:6",
    }


def test_config_document_an_alias_and_a_merge_key_are_copied_in():
    tree, _ = parse("base: &b {x: 1, y: 2}\nthing:\n  <<: *b\n  y: 3\n", "f.yaml")
    assert tree["thing"] == {"x": 1, "y": 3}
    assert tree["base"] == {"x": 1, "y": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: 2\na: 3", ["f.yaml:3", "'a'", "duplicate key", "f.yaml:1"]),
        ("a:\n  b: 1\n  b: 2", ["f.yaml:3", "'a.b'", "f.yaml:2"]),
        ("a: [1, 2", ["f.yaml", "not valid YAML"]),
        ("a:\n\t- b", ["f.yaml:2", "spaces"]),
        ("a: b: c", ["f.yaml:1", "quote"]),
        ("a: 1\n---\nb: 2", ["f.yaml:2", "one document"]),
        ("a: !!python/object/apply:os.system [ls]", ["f.yaml:1", "tag"]),
        ("a: !!int foo", ["f.yaml:1", "'foo'"]),
        ("? [1]\n: 2", ["f.yaml:1", "keys must be strings"]),
        ("1: 2", ["f.yaml:1", "keys must be strings", "'1'", "quotes"]),
        ("a: &x [*x]", ["f.yaml:1", "alias"]),
        ("a: *nowhere", ["f.yaml:1", "nowhere"]),
        ("a: " + "9" * 6000, ["f.yaml:1", "too long"]),
        ("a: " + "[" * 4000, ["f.yaml", "nested"]),
        ('a: "x\\0y"', ["f.yaml:1", "cannot be written"]),
        ('a: "\\ud800"', ["f.yaml:1", "cannot be written"]),
        ("a: 1\nb: \x01", ["f.yaml", "not valid YAML"]),
        ("a: 1\n<<: 3", ["f.yaml:2", "<<"]),
    ],
)
def test_config_document_what_is_refused_names_the_line(text, words):
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_config_document_aliases_of_aliases_do_not_fill_the_memory():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="more than"):
        parse("\n".join(lines), "f.yaml")


def test_config_document_a_file_that_is_missing_names_its_neighbour(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("name: x")
    with pytest.raises(ConfigError, match=r"does not exist.*Did you mean 'quickstart\.yaml'\?"):
        read(tmp_path / "quikstart.yaml")
    with pytest.raises(ConfigError, match=r"does not exist\. The directory"):
        read(tmp_path / "nowhere" / "a.yaml")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"# only a comment\n", "is empty"),
        (b"- a\n- b\n", "found a list"),
        (b"hello", "'hello'"),
        (b"a: 1\nb: \xff\xfe\n", ":2: this is not a text file"),
        (bytes(range(256)), "not a text file"),
    ],
)
def test_config_document_a_file_that_is_no_configuration_is_refused(tmp_path, data, words):
    path = tmp_path / "f.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert words in str(caught.value)


def test_config_document_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "f.yaml"
    path.write_bytes(b"\xef\xbb\xbfname: x\n")
    assert read(path).tree == {"name": "x"}


def test_config_document_a_directory_is_not_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    | st.sampled_from(["1e-5", "yes", "010", "2026-01-01", "1:30", "null", "~", "<<", "0x1F", "- a", "1_0", "=", ".5"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(PLAIN)
@example({"\x85": ["a\u2028b", "\u2029", "x\x85"]})
def test_config_document_plain_data_comes_back_as_it_was_written(value):
    assert parse(dump({"key": value}), "f.yaml")[0] == {"key": value}


def test_config_document_what_is_written_means_the_same_to_a_yaml_1_1_reader():
    data = {"text": ["yes", "010", "1e-5", "2026-01-01", "1:30"], "number": 1e-05, "flag": True, "none": None}
    assert yaml.safe_load(dump(data)) == data


def test_config_document_text_with_very_many_values_is_refused_before_all_of_it_is_read():
    begun = _Loader("[" + "a," * 300_000 + "]")
    with pytest.raises(yaml.YAMLError, match="more than 20000 values"):
        begun.get_single_node()
    assert begun.get_mark().index < 50_000
    with pytest.raises(ConfigError, match=r"c\.yaml: .*more than 20000 values: this is not a configuration"):
        parse("[" + "a," * 20_001 + "]", "c.yaml")


@pytest.mark.parametrize("number", ["9" * 5000, "0x" + "f" * 5000, "0o" + "7" * 9000])
def test_config_document_a_number_that_nothing_can_print_is_refused(number):
    with pytest.raises(ConfigError, match=r"c\.yaml:1: the number .{20}… is too long"):
        parse(f"a: {number}", "c.yaml")


def test_config_document_a_file_that_is_no_configuration_is_refused_by_its_size_without_reading_all_of_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse terabyte
    with pytest.raises(ConfigError, match=r"c\.yaml' is larger than 16 MiB, the maximum size"):
        read(path)
    path.write_text("".join(f"key{i}: 1\n" for i in range(200_000)))
    with pytest.raises(ConfigError, match="more than 20000 values: this is not a configuration"):
        read(path)
