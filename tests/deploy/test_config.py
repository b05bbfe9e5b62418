"""The configuration: complete by itself, and refused by name where it is wrong."""

from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from splitserve.cluster.settings import AppSettings, GatewaySettings, ListenSettings, PoolSettings
from splitserve.deploy.config import ConfigError, ServeSettings, app_settings, serve_settings
from splitserve.engine.settings import EngineSettings, SimulationSettings, TransferSettings


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes a file of these bytes or this text."""

    def write(content: str | bytes) -> Path:
        file = tmp_path / "config.yaml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write


def structs_of(kind: Any, found: set[type]) -> set[type]:
    """All settings classes that ``kind`` is made of."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        found.add(kind)
        for hint in get_type_hints(kind).values():
            structs_of(hint, found)
    for part in get_args(kind):
        structs_of(part, found)
    return found


def test_every_field_of_every_section_has_a_default() -> None:
    sections = structs_of(ServeSettings, set())
    assert sections == {
        ServeSettings,
        EngineSettings,
        SimulationSettings,
        TransferSettings,
        GatewaySettings,
        ListenSettings,
        PoolSettings,
    }
    for section in sections:
        section()
        assert section.__struct_config__.frozen  # type: ignore[attr-defined]
        assert section.__struct_config__.forbid_unknown_fields  # type: ignore[attr-defined]
        assert len(section.__struct_fields__) <= 15  # type: ignore[attr-defined]


def test_nothing_given_is_the_defaults() -> None:
    assert app_settings({}) == AppSettings()
    assert serve_settings(None, {}) == ServeSettings()


@pytest.mark.parametrize("content", ["", "# nothing but a comment\n", "---\n"])
def test_an_empty_file_is_the_defaults(written: Any, content: str) -> None:
    assert serve_settings(written(content), {}) == ServeSettings()


def test_what_the_file_says_is_taken(written: Any) -> None:
    settings = serve_settings(
        written(
            """
            listen: {host: 0.0.0.0, port: 9000}
            gateways: 2
            engine: {model: /models/m, max_model_tokens: 4096, simulation: {pages: 3}}
            prefill: {workers: 2, cpus: 0.5}
            gateway: {served_name: m}
            """
        ),
        {},
    )
    assert settings.listen == ListenSettings(host="0.0.0.0", port=9000)
    assert (settings.gateways, settings.served_name) == (2, "m")
    assert settings.engine == EngineSettings(
        model="/models/m", max_model_tokens=4096, simulation=SimulationSettings(pages=3)
    )
    assert settings.prefill == PoolSettings(workers=2, cpus=0.5)
    assert settings.decode == PoolSettings()


def test_the_served_name_is_the_model_where_none_is_given() -> None:
    assert app_settings({"engine": {"model": "m"}}).served_name == "m"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("prot: 1", ["`prot`"]),
        ("engine: {modle: m}", ["`modle`", "$.engine"]),
        ("engine: {simulation: {page: 1}}", ["`page`", "$.engine.simulation"]),
        ("decode: {worker: 1}", ["`worker`", "$.decode"]),
        ("1: 2", ["`$`"]),
        ("listen: {port: high}", ["`int`", "`str`", "$.listen.port"]),
        ("listen: {port: 70000}", ["65535", "$.listen.port"]),
        ("gateways: 0", [">= 1", "$.gateways"]),
        ("gateways: true", ["`int`", "`bool`", "$.gateways"]),
        ("prefill: {workers: 0}", [">= 1", "$.prefill.workers"]),
        ("prefill: {gpus: -1}", [">= 0", "$.prefill.gpus"]),
        ("engine: {transfer: {lease_s: .nan}}", ["$.engine.transfer.lease_s"]),
        ("engine: {dtype: int4}", ["'int4'", "$.engine.dtype"]),
        ("engine: {page_hash_key: ''}", ["length >= 1", "$.engine.page_hash_key"]),
        ("engine:", ["`object`", "`null`", "$.engine"]),
        ("engine: smollm2", ["`object`", "`str`", "$.engine"]),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_path(written: Any, content: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        serve_settings(written(content), {})
    assert [part for part in named if part not in str(raised.value)] == []


def test_the_ray_cluster_is_not_for_an_application_under_serve() -> None:
    with pytest.raises(ConfigError, match="unknown field `ray_address`"):
        app_settings({"ray_address": "auto"})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        serve_settings(tmp_path / "nowhere.yaml", {})


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        serve_settings(tmp_path, {})


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("engine: [", id="open bracket"),
        pytest.param("a: b: c", id="two colons"),
        pytest.param("\tengine: {}", id="tab"),
        pytest.param("engine: *nowhere", id="alias"),
        pytest.param("engine: !!python/object:os.system {}", id="Python object"),
        pytest.param("ray_address: 2020-99-99", id="no date"),
        pytest.param(b"\xff\xfe\x00", id="bytes"),
        pytest.param("a: 1\n---\nb: 2", id="two documents"),
    ],
)
def test_what_is_no_yaml_is_refused_with_the_files_name(written: Any, content: str | bytes) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml is not valid YAML"):
        serve_settings(written(content), {})


@pytest.mark.parametrize(("content", "kind"), [("- a", "list"), ("just words", "str"), ("42", "int")])
def test_a_file_without_keys_is_refused(written: Any, content: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"expected keys and values, got {kind}"):
        serve_settings(written(content), {})


def test_overrides_go_over_the_file_and_leave_the_rest(written: Any) -> None:
    file = written("engine: {model: m, page_tokens: 8}\nlisten: {port: 9000}")
    settings = serve_settings(file, {"engine.model": "other", "listen.port": 9001, "decode.workers": 3})
    assert settings.engine == EngineSettings(model="other", page_tokens=8)
    assert (settings.listen.port, settings.decode.workers, settings.prefill.workers) == (9001, 3, 1)


def test_an_override_of_one_pool_leaves_the_other_one_that_shares_its_anchor(written: Any) -> None:
    settings = serve_settings(written("prefill: &pool {cpus: 2}\ndecode: *pool"), {"prefill.workers": 4})
    assert settings.prefill == PoolSettings(workers=4, cpus=2)
    assert settings.decode == PoolSettings(workers=1, cpus=2)


@pytest.mark.parametrize("content", ["engine:", "engine: smollm2", "engine: []"])
def test_an_override_in_a_section_that_is_none_is_refused(written: Any, content: str) -> None:
    with pytest.raises(ConfigError, match=r"\$\.engine"):
        serve_settings(written(content), {"engine.model": "m"})


def test_a_wrong_override_is_named() -> None:
    with pytest.raises(ConfigError, match=r"\$\.prefill\.workers"):
        serve_settings(None, {"prefill.workers": 0})
    with pytest.raises(ConfigError, match="unknown field `nothing`"):
        serve_settings(None, {"gateway.nothing": 0})


@pytest.mark.parametrize("value", [0, -1, 90_000, float("inf"), float("nan")])
def test_deadlines_of_the_hand_over_are_bounded(value: float) -> None:
    with pytest.raises(ConfigError, match="lease_s"):
        app_settings({"engine": {"transfer": {"lease_s": value}}})


def test_a_page_hash_key_is_measured_in_bytes() -> None:
    assert app_settings({"engine": {"page_hash_key": "k" * 64}}).engine.page_hash_key == "k" * 64
    with pytest.raises(ConfigError, match="page_hash_key"):
        app_settings({"engine": {"page_hash_key": "ü" * 64}})
