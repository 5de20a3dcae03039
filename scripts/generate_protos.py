"""Regenerates `outrider/v1` and `outrider/internal` from `protos/`: `python -m scripts.generate_protos`."""

import argparse
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Write the Python modules and type stubs for every proto below `output`."""
    protos = ROOT / "protos"
    sources = sorted(protos.rglob("*.proto"))
    services = [path for path in sources if "\nservice " in path.read_text()]
    arguments = ["protoc", f"--proto_path={protos}", f"--proto_path={files('grpc_tools') / '_proto'}"]
    messages = [f"--python_out={output}", f"--pyi_out={output}", *map(str, sources)]
    stubs = [f"--grpc_python_out={output}", *map(str, services)]
    if any(protoc.main([*arguments, *made]) != 0 for made in (messages, stubs)):
        raise SystemExit("protoc failed; see the messages above")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    generate(ROOT)
