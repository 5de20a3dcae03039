"""Regenerate `outrider/v1` and `outrider/internal` from `protos/`; an argument names another output
folder."""

import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Write the Python modules and type stubs for every proto below `output`."""
    protos = ROOT / "protos"
    sources = [str(path.relative_to(protos)) for path in sorted(protos.rglob("*.proto"))]
    arguments = [
        "protoc",
        f"--proto_path={protos}",
        f"--proto_path={files('grpc_tools') / '_proto'}",
        f"--python_out={output}",
        f"--pyi_out={output}",
        f"--grpc_python_out={output}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed; see the messages above")


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
