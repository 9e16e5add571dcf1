"""Configurations of CNI networks: found by name, checked, kept whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import InvalidRequest
from forgeyard_networks.cni.attachment import Attachment, cni_args
from forgeyard_networks.cni.config import SPOKEN, conflist_of, parse_conflist
from forgeyard_networks.cni.load import list_networks, load_network
from forgeyard_networks.cni.result import parse_result

LIST: dict[str, Any] = {"cniVersion": "1.0.0", "name": "office", "plugins": [{"type": "bridge", "bridge": "br7"}]}


def put(directory: Path, name: str, value: object) -> None:
    """Write a configuration file."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(value if isinstance(value, str) else json.dumps(value))


def test_a_network_is_found_by_its_name_and_not_by_its_file(tmp_path: Path) -> None:
    """Lists come before single plugins, then the order of file names; other files may be broken."""
    put(tmp_path, "10-broken.conflist", "{")
    put(tmp_path, "15-one.conf", {"cniVersion": "0.4.0", "name": "office", "type": "ptp"})
    put(tmp_path, "20-b.conflist", LIST)
    put(tmp_path, "30-c.conflist", LIST | {"plugins": [{"type": "macvlan"}]})
    put(tmp_path, "90-other.json", {"cniVersion": "0.3.1", "name": "lab", "type": "vlan"})
    put(tmp_path, "readme.txt", "office")
    (tmp_path / "dir.conflist").mkdir()
    found = load_network("office", (str(tmp_path),))
    assert (found.plugins[0].kind, found.source) == ("bridge", str(tmp_path / "20-b.conflist"))
    assert load_network("lab", (str(tmp_path / "absent"), str(tmp_path))).plugins[0].kind == "vlan"
    networks, broken = list_networks((str(tmp_path),))
    assert [network.name for network in networks] == ["office", "lab"]
    assert len(broken) == 1


def test_a_network_that_is_not_there_names_what_is(tmp_path: Path) -> None:
    """The message has the directory and the known names; of broken files the first, since it may be that."""
    put(tmp_path, "1.conflist", LIST)
    with pytest.raises(InvalidRequest, match=r"'lab'.*there is office"):
        load_network("lab", (str(tmp_path),))
    put(tmp_path, "2.conflist", "[]")
    with pytest.raises(InvalidRequest, match=r"2\.conflist: JSON"):
        load_network("lab", (str(tmp_path),))
    with pytest.raises(InvalidRequest, match="no network is configured"):
        load_network("lab", (str(tmp_path / "absent"),))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "a/b"}, "name 'a/b'"),
        ({"name": "-a"}, "name '-a'"),
        ({"name": "a\n"}, r"name 'a\n'"),
        ({"name": 7}, "name '7'"),
        ({"plugins": []}, "plugins '[]'"),
        ({"plugins": [{"bridge": "x"}]}, "plugins.0.type 'nothing'"),
        ({"plugins": [{"type": "../../bin/sh"}]}, "plugins.0.type '../../bin/sh'"),
        ({"plugins": [{"type": "a", "capabilities": {"mac": 3}}]}, "plugins.0.capabilities.mac '3'"),
        ({"cniVersion": "9.9.9"}, "cniVersion '9.9.9'"),
        ({"cniVersion": ""}, "write one of 0.3.0"),
        ({"disableCheck": "perhaps"}, "disableCheck 'perhaps'"),
    ],
)
def test_a_wrong_value_is_named_in_one_line(change: dict[str, Any], words: str) -> None:
    """File, key, value and cure."""
    with pytest.raises(InvalidRequest) as caught:
        conflist_of(LIST | change, "/etc/x.conflist")
    assert words in str(caught.value)
    assert "/etc/x.conflist: " in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text() | st.integers(), st.lists).map(json.dumps))
def test_no_file_makes_anything_but_a_named_error(text: str | bytes) -> None:
    """Garbage is refused as such."""
    with pytest.raises(InvalidRequest):
        parse_conflist(text, "file")


def test_deep_nesting_is_garbage_too() -> None:
    """No recursion error comes through."""
    with pytest.raises(InvalidRequest):
        parse_conflist("[" * 200_000, "file")


def test_the_newest_common_version_is_taken() -> None:
    """Of cniVersion and cniVersions together, unknown ones left out."""
    found = conflist_of(LIST | {"cniVersions": ["0.4.0", "1.1.0", "2.0.0"]}, "f")
    assert found.version == "1.1.0"
    assert found.versions == ("0.4.0", "1.0.0", "1.1.0")
    assert found.at("0.4.0").speaks("0.3.1")
    assert not found.at("0.4.0").speaks("1.0.0")
    assert SPOKEN[-1] == "1.1.0"


def test_a_plugin_gets_all_its_keys_and_only_its_capabilities() -> None:
    """Unknown keys go through, name and version come from the list, capabilities are taken out."""
    plugin = {"type": "x", "name": "wrong", "future": {"a": [1]}, "capabilities": {"mac": True, "ips": False}}
    config = conflist_of(LIST | {"plugins": [plugin]}, "f")
    wanted = {"mac": "02:00:00:00:00:01", "ips": ["10.0.0.1/8"]}
    assert config.document(config.plugins[0], wanted, prevResult=None) == {
        "type": "x",
        "name": "office",
        "cniVersion": "1.0.0",
        "future": {"a": [1]},
        "runtimeConfig": {"mac": "02:00:00:00:00:01"},
    }
    assert config.capabilities == {"mac"}


@pytest.mark.parametrize(
    ("container", "ifname"),
    [
        ("", "eth0"),
        (".a", "eth0"),
        ("a:b", "eth0"),
        ("a", ""),
        ("a", ".."),
        ("a", "e/0"),
        ("a", "x" * 16),
        ("a", "e 0"),
    ],
)
def test_names_that_cni_does_not_allow_are_refused(container: str, ifname: str) -> None:
    """They become file names and environment."""
    with pytest.raises(InvalidRequest):
        Attachment.checked("net", container, ifname)


def test_attachments_do_not_share_a_key() -> None:
    """Hyphens in names do not make two the same."""
    one, two = Attachment("n", "x-y", "e"), Attachment("n-x", "y", "e")
    assert one.key != two.key
    assert Attachment.from_key(one.key) == one
    assert Attachment.from_key(".n:x:e") is None


def test_args_can_not_smuggle_a_pair() -> None:
    """A semicolon in a value would be another pair to the plugin."""
    assert cni_args({"A": "1", "B": "x=y"}) == "A=1;B=x=y"
    for wrong in ({"A": "1;B=2"}, {"A=B": "1"}, {"": "1"}):
        with pytest.raises(InvalidRequest):
            cni_args(wrong)


def test_results_of_all_versions_are_read() -> None:
    """Nulls and empty strings, as Go programs print them, and what old versions have besides."""
    result = parse_result(
        {
            "interfaces": None,
            "ips": [{"version": "4", "address": "10.0.0.2/8", "gateway": ""}, {"address": "fd00::2/64"}],
            "routes": [{"dst": "10.1.2.3/8", "gw": "10.0.0.1"}],
            "dns": None,
        }
    )
    assert [str(address) for address in result.ipv4] == ["10.0.0.2/8"]
    assert str(result.routes[0].to) == "10.0.0.0/8"
    for wrong in ({"ips": [{"address": "x"}]}, {"ips": [{"address": "10.0.0.1/8", "interface": 0}]}, {"routes": 1}):
        with pytest.raises(ValueError, match=r"ips|routes"):
            parse_result(wrong)
