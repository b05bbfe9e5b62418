"""The command ``splitserve``: what its options come to, and its exit status."""

import subprocess
import sys
from pathlib import Path

import pytest

from splitserve import __version__
from splitserve.deploy import command_line, serving
from splitserve.deploy.command_line import main
from splitserve.deploy.config import ServeSettings
from splitserve.deploy.serving import StartFailed


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeSettings]:
    """The settings of each application that would have been started; Ray and the environment stay as they are."""
    started: list[ServeSettings] = []
    monkeypatch.setattr(serving, "serve_until_stopped", started.append)
    monkeypatch.setattr(command_line, "prepare_ray_environment", lambda: None)
    return started


def test_without_options_the_defaults_are_served(served: list[ServeSettings]) -> None:
    assert main(["serve"]) == 0
    assert served == [ServeSettings()]


def test_each_option_reaches_its_setting(served: list[ServeSettings]) -> None:
    options = "--model m --served-name n --prefill 2 --decode 3 --host 0.0.0.0 --port 9000 --ray-address local"
    assert main(["serve", *options.split()]) == 0
    (settings,) = served
    assert (settings.engine.model, settings.served_name) == ("m", "n")
    assert (settings.prefill.workers, settings.decode.workers) == (2, 3)
    assert (settings.listen.host, settings.listen.port) == ("0.0.0.0", 9000)
    assert settings.ray_address == "local"


def test_options_go_over_the_file(served: list[ServeSettings], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("listen: {port: 9000}\nprefill: {workers: 2}\ngateways: 3")
    assert main(["serve", "--config", str(file), "--prefill", "4"]) == 0
    (settings,) = served
    assert (settings.listen.port, settings.prefill.workers, settings.gateways) == (9000, 4, 3)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prefill", "0"], "$.prefill.workers"),
        (["--decode", "-1"], "$.decode.workers"),
        (["--port", "0"], "$.listen.port"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file"),
    ],
)
def test_a_wrong_configuration_is_one_line_and_status_2(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    assert main(["serve", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("splitserve: ")
    assert named in said.err
    assert said.err.count("\n") == 1
    assert served == []


@pytest.mark.parametrize(
    "argv", [[], ["serve", "--prefill", "many"], ["serve", "--port"], ["serve", "--unknown"], ["stop"]]
)
def test_wrong_options_are_status_2(
    served: list[ServeSettings], capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 2
    assert "usage: splitserve" in capsys.readouterr().err
    assert served == []


def test_a_failure_to_start_is_one_line_and_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: ServeSettings) -> None:
        raise StartFailed(f"cannot listen on {settings.listen.host}:{settings.listen.port}")

    monkeypatch.setattr(serving, "serve_until_stopped", fail)
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "splitserve: cannot listen on 127.0.0.1:8000\n"


@pytest.mark.parametrize(("argv", "said"), [(["--version"], __version__), (["serve", "--help"], "--served-name")])
def test_version_and_help(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as raised:
        main(argv)
    assert raised.value.code == 0
    assert said in capsys.readouterr().out


def test_the_command_and_the_builder_are_imported_without_ray() -> None:
    """Ray reads its environment when it is imported, and the command sets that first."""
    code = "import sys, splitserve.deploy, splitserve.deploy.command_line; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
