"""A secret that is typed reaches the job, and nothing that is kept, shown or handed on."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from processes import JOBS, refused, run

TOKEN = "hf_AbCdEf123"
URL = "https://me:PaSsWoRd@host/data"
SECRETS = ("AbCdEf123", "PaSsWoRd")
JOB = JOBS / "secret.py"
TYPED = (JOB, "--hf-token", TOKEN, "--data-url", URL)


def read_all(folder: Path) -> list[str]:
    """Files in which a secret stands."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "given.json"]
    assert files
    return [
        f"{path}: {text}"
        for path in files
        for text in SECRETS
        if text.encode() in path.read_bytes()
    ]


def read_recorded_flags(folder: Path) -> dict[str, object]:
    values: dict[str, object] = json.loads((folder / "given.json").read_text())
    return values


def test_a_run_keeps_no_secret_and_goes_on_with_it(tmp_path: Path) -> None:
    typed = "train", *TYPED, "--given", "given.json", "--run-dir", "run"
    for steps in (2, 4):
        done = run(*typed, "--steps", steps, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert not [text for text in SECRETS if text in done.stdout + done.stderr]
        assert (
            read_recorded_flags(tmp_path)["hf_token"],
            read_recorded_flags(tmp_path)["data_url"],
        ) == (TOKEN, URL)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["config"]["hf_token"] == config["definition"]["hf_token"] == "***"
    assert config["config"]["data_url"] == "https://me:***@host/data"
    assert config["config"]["pad_token"] == "<pad>"
    assert run("report", "run", cwd=tmp_path).returncode == 0
    assert "***" in (tmp_path / "report.html").read_text()
    assert not read_all(tmp_path)
    refused(
        run(*typed, "--pad-token", "x", "--steps", 4, cwd=tmp_path),
        "was started with pad_token=<pad>",
    )


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("mlflow") is None, reason="MLflow is not installed: stepladder[mlflow]"
)
def test_a_service_for_curves_gets_no_secret(tmp_path: Path) -> None:
    env = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/store", "MLFLOW_ALLOW_FILE_STORE": "true"}
    done = run("train", *TYPED, "--log-to", "mlflow", "--run-dir", "run", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    (stored,) = (tmp_path / "store").rglob("params/hf_token")
    assert stored.read_text() == "***"
    assert not read_all(tmp_path)


def test_verify_of_a_run_asks_for_no_mask(tmp_path: Path) -> None:
    """What is not kept is the file's default again, or what is typed; *** would be another value."""
    run("train", *TYPED, "--max-tokens", 9, "--run-dir", "run", cwd=tmp_path)
    train_arguments = (
        "verify",
        "run",
        "--nproc",
        "1",
        "--steps",
        2,
        "--given",
        "given.json",
        "--trust-job-file",
    )
    assert run(*train_arguments, cwd=tmp_path).returncode == 0
    assert (
        read_recorded_flags(tmp_path)["hf_token"],
        read_recorded_flags(tmp_path)["data_url"],
        read_recorded_flags(tmp_path)["max_tokens"],
    ) == ("", "", 9)
    assert run(*train_arguments, "--hf-token", TOKEN, cwd=tmp_path).returncode == 0
    assert read_recorded_flags(tmp_path)["hf_token"] == TOKEN


def test_a_page_about_an_older_run_shows_no_secret(tmp_path: Path) -> None:
    run("train", *TYPED, "--run-dir", "run", cwd=tmp_path)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["config"]["hf_token"] = config["definition"]["hf_token"] = TOKEN
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    assert run("report", "run", cwd=tmp_path).returncode == 0
    assert "AbCdEf123" not in (tmp_path / "report.html").read_text()


def test_a_script_s_launches_keep_no_secret(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys; open('given.json', 'w').write(str(sys.argv[1:]))"
    )
    arguments = ["--api-key", TOKEN, f"DB_PASSWORD={TOKEN}", URL]
    assert run("run", "--run-dir", "its", "script.py", *arguments, cwd=tmp_path).returncode == 0
    assert (tmp_path / "given.json").read_text() == str(arguments)
    assert run("report", "its", cwd=tmp_path).returncode == 0
    launch = (tmp_path / "its" / "launches.jsonl").read_text()
    assert "--api-key '***' 'DB_PASSWORD=***' 'https://me:***@host/data'" in launch
    assert not read_all(tmp_path)


@pytest.mark.parametrize(
    "arguments",
    [("train", *TYPED), ("run", "script.py", "--hf-token", TOKEN, f"DB_PASSWORD={TOKEN}", URL)],
)
def test_a_batch_script_holds_no_secret(tmp_path: Path, arguments: tuple[object, ...]) -> None:
    (tmp_path / "script.py").write_text("import sys\n")
    shown = run("submit", "--dry-run", "--", *arguments, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert not [text for text in SECRETS if text in shown.stdout]
    assert "_HF_TOKEN:?is not set}" in shown.stdout and "--hf-token '***'" in shown.stdout


def test_help_shows_no_secret_that_stands_in_the_file(tmp_path: Path) -> None:
    text = JOB.read_text().replace('hf_token: str = ""', f'hf_token: str = "{TOKEN}"')
    (tmp_path / "job.py").write_text(text)
    shown = run("train", "job.py", "--help", cwd=tmp_path).stdout
    assert "[default: ***]" in shown and TOKEN not in shown
