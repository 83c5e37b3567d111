"""A stranger's visit to a torchft job; `torchft_stranger.py` starts it. Prints one line of JSON.

python torchft_visit.py LIGHTHOUSE_URL look|quorum|kill
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from datetime import timedelta
from typing import Any

from torchft.coordination import LighthouseClient

LIMIT = timedelta(seconds=20)
LIMIT_S = 20.0


def look(url: str) -> str:
    with urllib.request.urlopen(f"{url}/status", timeout=LIMIT_S) as page:
        text: str = page.read().decode(errors="replace")
    return text


def ask_for_quorum(url: str) -> dict[str, Any]:
    """Join by one request, with nobody behind the addresses given."""
    client = LighthouseClient(url, connect_timeout=LIMIT)
    client.heartbeat("stranger", timeout=LIMIT)
    quorum = client.quorum(
        "stranger", timeout=LIMIT, address="http://10.77.0.4:1", store_address="10.77.0.4:1", step=0, world_size=1
    )
    return {"stranger_is_in_quorum_of": len(quorum.participants)}


def kill(url: str) -> dict[str, Any]:
    named = re.findall(r'hx-post="(/replica/replica_0[^"]*/kill)"', look(url))
    if not named:
        return {"kill": "nobody is named"}
    request = urllib.request.Request(url + named[0], method="POST")
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return {"kill": answer.status}
    except (OSError, urllib.error.URLError) as error:
        return {"kill": str(error)}


if __name__ == "__main__":
    url, what = sys.argv[1:]
    if what == "look":
        print(json.dumps({"status_page_names_members": "/kill" in look(url)}))
    else:
        print(json.dumps(kill(url) if what == "kill" else ask_for_quorum(url)))
