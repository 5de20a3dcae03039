"""The command line as a whole: help, versions, exit statuses, and what it does not import."""

from __future__ import annotations

import fcntl
import io
import os
import re
import subprocess
import sys
import tempfile
import termios
from types import ModuleType

import pytest

from outrider import __version__
from outrider.__main__ import main as entry_point
from outrider.cli.commands import COMMANDS
from outrider.cli.main import main
from outrider.cli.serve import SERVICES

WORDS = ((), *((command.name,) for command in COMMANDS), *(("serve", service) for service in SERVICES))


@pytest.mark.parametrize("command", WORDS, ids=" ".join)
def test_every_command_has_help(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """--help explains each command and exits with 0."""
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: outrider")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is printed."""
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"outrider {__version__}\n")


def test_print_config_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Settings can be looked at without a model."""
    assert main(["serve", "verify", "--model", "x", "--print-config"]) == 0
    assert 'model = "x"' in capsys.readouterr().out
    assert main(["up", "--target", "x", "--print-config"]) == 0
    assert 'target = "x"' in capsys.readouterr().out


def test_a_wrong_setting_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and no traceback."""
    assert main(["serve", "verify", "--max-sessions", "0"]) == 2
    assert capsys.readouterr().err == "outrider: --max-sessions: must be above 0, not '0'\n"


@pytest.mark.parametrize("flag", ["--drafts", "--verifies"])
def test_replicas_beyond_any_machine_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before thousands of processes take all memory."""
    assert main(["up", "--target", "x", "--print-config", flag, "65"]) == 2
    assert f"outrider: {flag}: must be 64 or less" in capsys.readouterr().err


def test_abbreviated_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A script that says --max-sess would break when another flag begins alike."""
    assert main(["serve", "verify", "--max-sess", "3"]) == 2
    assert "did you mean --max-sessions?" in capsys.readouterr().err


def test_the_command_line_starts_without_torch() -> None:
    """Everything but a model service starts in a moment."""
    check = "import sys, outrider.cli.main, outrider.cli.generate, outrider.cli.bench.command\n"
    check += "import outrider.cli.up.command, outrider.process\n"
    check += "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'numba')))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def test_closed_streams_are_not_taken_for_others() -> None:
    """What a shell closes (`<&- 2>&-`) is opened to nowhere: no socket gets its number."""
    program = "import os, sys; from outrider.cli.main import main\n"
    program += "try: main(['--version'])\nexcept SystemExit: pass\n"
    program += "print(os.open(os.devnull, os.O_RDONLY), sys.stdin.read(), file=sys.stdout)\n"
    program += "print('lost', file=sys.stderr)"
    shell = ["sh", "-c", 'exec "$0" -c "$1" <&- 2>&-', sys.executable, program]
    ended = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == 0
    assert int(ended.stdout.splitlines()[-1]) > 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no full device")
@pytest.mark.parametrize("line", ["up --target x --print-config", "up --help", "--version"])
def test_a_full_disk_is_one_sentence(line: str) -> None:
    """Output that finds no room ends the command without a traceback."""
    command = [sys.executable, "-m", "outrider", *line.split()]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    said = "outrider: no space is left where the output goes; make room there\n"
    assert (ended.returncode, ended.stderr) == (1, said)


def test_too_few_files_are_one_sentence() -> None:
    """A limit that not even the first child fits into is named."""
    command = (
        'ulimit -n 10; exec "$0" -m outrider up --target models/demo/target --draft lookup --http-port -1'
    )
    ended = subprocess.run(
        ["sh", "-c", command, sys.executable], stderr=subprocess.PIPE, text=True, timeout=60
    )
    said = "outrider: this process may open no more files; raise the limit (ulimit -n)\n"
    assert (ended.returncode, ended.stderr) == (1, said)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "this machine has no memory left; end other processes"),
        (
            RuntimeError("CUDA error: out of memory\nadvice"),
            "no memory is left (CUDA error: out of memory); lower",
        ),
        (RuntimeError("can't start new thread"), "no more processes or threads can be started; raise the"),
    ],
)
def test_no_memory_and_no_thread_are_one_sentence(
    error: Exception, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 and no traceback."""

    def exhausted(_: object) -> int:
        raise error

    monkeypatch.setattr("outrider.cli.main._run", exhausted)
    assert main(["serve", "gateway"]) == 1
    assert capsys.readouterr().err.startswith(f"outrider: {sentence}")


@pytest.mark.parametrize(
    "command",
    [
        ["up", "--target", "models/demo/target", "--http-port", "-1"],
        ["serve", "verify", "--model", "models/demo/target"],
    ],
)
def test_without_a_temporary_folder_the_variable_is_named(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container whose file system is read-only. torch needs such a folder too."""
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    assert main(command) == 2
    assert capsys.readouterr().err.startswith("outrider: TMPDIR: no temporary folder can be made (No such")


def test_a_closed_output_is_no_traceback() -> None:
    """As in `outrider generate ... >&-`: nobody wants what it prints."""
    command = [sys.executable, "-m", "outrider", "up", "--target", "x", "--print-config"]
    ended = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=60, preexec_fn=lambda: os.close(1)
    )
    assert (ended.returncode, ended.stderr) == (0, "")


SERVE_UNTIL_CLOSED = """
import signal, sys
from outrider.cli import main, serve
def until_closed(arguments):
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    print("ready", flush=True)
    signal.sigwait([signal.SIGHUP])
    return 0
serve.serve = until_closed
sys.exit(main.main(["serve", "verify"]))
"""


def test_a_terminal_that_was_closed_is_no_failure() -> None:
    """A service whose terminal is closed has been asked to stop. Even no bytes can be written to it then."""
    master, terminal = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SERVE_UNTIL_CLOSED],
        stdout=terminal,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(1, termios.TIOCSCTTY, 0),
        text=True,
    ) as process:
        os.close(terminal)
        with open(master, "rb", buffering=0) as screen:
            assert screen.readline() == b"ready\r\n"  # to its end: the system passes a line on in parts
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")


@pytest.mark.parametrize("line", ["up --target x", "serve draft --model x", "layers --target x --prompts y"])
def test_more_threads_than_any_machine_has_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The sentence names the bound."""
    try:
        status: object = main([*line.split(), "--threads", "100000"])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert re.search("--threads: must be .*1024.*, not '100000'", capsys.readouterr().err)


def test_characters_that_a_terminal_lacks_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the output is shown."""
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["up", "--target", "x", "--print-config"]) == 0
    print("caf\u00e9", flush=True)
    assert shown.getvalue().endswith(b"caf?\n")


def test_a_service_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence with the name of the extra."""
    monkeypatch.setattr("outrider.telemetry.logs.configure_logging", lambda *_: None)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    for name in [name for name in sys.modules if name.startswith("orchestrator.gateway")]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["serve", "gateway"]) == 2
    assert "pip install 'outrider[gateway]'" in capsys.readouterr().err


def test_ctrl_c_while_modules_are_imported_is_no_traceback(monkeypatch):
    """The command ends with the status of Ctrl-C from its first moment."""

    class Interrupted(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "outrider.cli.main", Interrupted("outrider.cli.main"))
    assert entry_point() == 130


def test_ctrl_c_while_flags_are_read_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """All commands have theirs made first; a busy machine takes a second for it."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.cli.main._parser", interrupted)
    assert entry_point() == 130


def test_a_reader_that_has_gone_ends_the_command_without_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in `outrider generate ... | head`: status 1, and nothing on standard error."""

    def closed(_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("outrider.cli.main._run", closed)
    monkeypatch.setattr("outrider.cli.main.drop_output", lambda: None)
    assert main(["top"]) == 1
    assert capsys.readouterr().err == ""


def test_the_first_process_of_a_container_heeds_sigterm() -> None:
    """SIGTERM ends it before its service listens for signals, though the kernel does nothing by itself."""
    program = (
        "import os, signal, outrider.__main__ as command, outrider.cli.main as cli\n"
        "os.getpid = lambda: 1\n"
        "cli.main = lambda: signal.raise_signal(signal.SIGTERM)\n"
        "raise SystemExit(command.main())"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 130
