"""How many lines an adapter passes from its file to the kernels: `python scripts/path_lines.py [TREE]`.

Counted are the files that read and check an adapter (`adapters/` without what fetches it, `inspect`, the journal and
the registry) and the memory that holds it (`memory/` without the counters, the prediction and the monitor, which look
on).
At 9921671 that was 8,516 lines.
"""

from __future__ import annotations

import sys
from pathlib import Path

NOT_ON_THE_WAY = {
    *("adapters/__init__.py", "adapters/inspect.py"),
    *("memory/stats.py", "memory/care/prediction.py", "memory/care/monitor.py"),
}


def counted_files(package: Path) -> list[Path]:
    files = [*(package / "adapters").glob("*.py"), *(package / "memory").rglob("*.py")]
    return sorted(path for path in files if str(path.relative_to(package)) not in NOT_ON_THE_WAY)


def main() -> None:
    package = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "loraplex"
    total = 0
    for path in counted_files(package):
        lines = path.read_text().count("\n")
        total += lines
        print(f"{lines:6} {path.relative_to(package)}")
    print(f"{total:6} from adapter file to kernel")


if __name__ == "__main__":
    main()
