"""Build the wheel and the source archive, install the wheel in an empty environment, and use it there.

    make dist

Prints sizes and what each step gave. Exits with 1 if the wheel or a plain install is too large, if something missing is
not named with its extra, or if the README's first example prints something else than the README says.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST, CONSTRAINTS = ROOT / "dist", ROOT / "constraints.txt"
BASE = ["torch", "transformers", "datasets", "accelerate"]
WHEEL_KB, INSTALL_MB = 1402, 60  # the most that the wheel may take, and a plain install beyond `BASE`
# What a plain install lacks: Python code -> the message that it must end with.
MISSING = {
    "from lamina import LaminaClassifier": "Run: pip install 'lamina[sklearn]'",
    "import lamina; lamina.studies.probe": "Run: pip install 'lamina[studies]'",
    "from lamina.report import write_page; write_page('.', 'x.html')": "Run: pip install 'lamina[report]'",
}
failures: list[str] = []


def main() -> int:
    """Run all steps; return the exit code."""
    shutil.rmtree(DIST, ignore_errors=True)
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT]  # hatchling comes with [dist]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = DIST.glob("*.whl")
    for file in sorted(DIST.iterdir()):
        print(f"{file.name}: {file.stat().st_size / 1000:.0f} KB")
    expect(wheel.stat().st_size < WHEEL_KB * 1000, f"the wheel takes {WHEEL_KB} KB or more")
    with tempfile.TemporaryDirectory() as folder:
        python = empty_environment(Path(folder))
        install(python, *BASE)
        base = size(python)
        install(python, str(wheel))
        added = size(python) - base
        print(f"{' + '.join(BASE)}: {base:.0f} MB; a plain install adds {added:.1f} MB")
        expect(added <= INSTALL_MB, f"a plain install adds more than {INSTALL_MB} MB")
        for code, message in MISSING.items():
            printed = run(python, folder, code)
            print(f"{code}\n    {printed.splitlines()[-1] if printed else ''}")
            expect(printed.rstrip().endswith(message), f"{code!r} does not end with {message!r}")
        install(python, f"{wheel}[demo]")
        code, promised = readme_example()
        printed = run(python, folder, code)
        print(f"The README's example prints:\n{printed}", end="")
        expect(printed.endswith(promised), "the README's example prints something else than the README says")
    for failure in failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return int(bool(failures))


def expect(holds: bool, failure: str) -> None:
    """Remember what failed, so that the other steps still run."""
    if not holds:
        failures.append(failure)


def empty_environment(folder: Path) -> Path:
    """Make a virtual environment in `folder` and return its interpreter."""
    venv.create(folder / "venv", with_pip=True)
    return folder / "venv" / "bin" / "python"


def install(python: Path, *packages: str) -> None:
    """Install packages, in the versions that the tests run with."""
    quick = ["--quiet", "--no-compile"]  # few of the modules are imported here
    subprocess.run([python, "-m", "pip", "install", *quick, "-c", CONSTRAINTS, *packages], check=True)


def size(python: Path) -> float:
    """Return the size in MB of everything that is installed in the environment, without bytecode."""
    files = [path for path in (python.parents[1] / "lib").rglob("*") if path.suffix != ".pyc" and not path.is_symlink()]
    return sum(file.stat().st_size for file in files if file.is_file()) / 1e6


def run(python: Path, folder: str, code: str) -> str:
    """Run code outside the project and return what it prints: the output, or the errors if it fails."""
    done = subprocess.run([python, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else done.stdout


def readme_example() -> tuple[str, str]:
    """Return the first Python block of the README and the output below it."""
    found = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    if found is None:
        raise SystemExit("README.md has no Python block that is followed by its output")
    return found[1], found[2]


if __name__ == "__main__":
    sys.exit(main())
