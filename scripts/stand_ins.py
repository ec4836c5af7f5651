"""Stand-ins of benches for the rest of a cluster: engines, a scheduler, sidecars; each a process on loopback.

They do as little as possible and speak the real wire protocol. `python scripts/stand_ins.py engine`, `scheduler URL…`
and `sidecars NUM TOGETHER` serve until they are ended; they print one line with the port, or the port of each sidecar.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripts.stub_engine import serve_engine
from scripts.stub_scheduler import serve_scheduler
from scripts.stub_sidecars import serve_sidecars
from services.security.certificates import Certificates
from services.security.settings import NO_TLS, TlsSettings


def main() -> None:
    """Serve as the stand-in that the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    engine, scheduler = parts.add_parser("engine"), parts.add_parser("scheduler")
    for one in (engine, scheduler):
        one.add_argument("--tls", metavar="DIR", help="certificates of `block certs`; clients must present one, too")
    scheduler.add_argument("urls", nargs="+", help="of the engines")
    sidecars = parts.add_parser("sidecars")
    sidecars.add_argument("num", type=int)
    sidecars.add_argument("together", type=int, help="number behind one port")
    sidecars.add_argument("--changing", action="store_true", help="indicators change all the time, as under load")
    arguments = parser.parse_args()
    if arguments.part == "engine":
        uvloop.run(serve_engine(certificates_in(arguments.tls, "engine")))
    elif arguments.part == "scheduler":
        uvloop.run(serve_scheduler(arguments.urls, certificates_in(arguments.tls, "scheduler")))
    else:
        uvloop.run(serve_sidecars(arguments.num, arguments.together, changing=arguments.changing))


def certificates_in(folder: str | None, part: str) -> Certificates:
    """Return the certificates of a part, or none."""
    if not folder:
        return Certificates(NO_TLS)
    return Certificates(
        TlsSettings(tls_cert=f"{folder}/{part}.crt", tls_key=f"{folder}/{part}.key", tls_ca=f"{folder}/ca.crt")
    )


if __name__ == "__main__":
    main()
