"""Pull an entry of one node's keeper to another node.

Here both are on this machine, so that it takes no key.
"""

import numpy as np

import vram
from vram.nodes.carrier import Carrier

with vram.private_keeper() as first, vram.private_keeper() as second:
    vram.publish("model", {"w": np.arange(1_000_000, dtype=np.float32)}, meta={"revision": "7"}, keeper=first)

    with Carrier("127.0.0.1:0", keeper=first) as carrier:  # on the first node; `vram carry` is the same
        done = vram.replicate(carrier.address, "model", keeper=second)  # on the second
        print(f"{done.nbytes} bytes by {done.engine}, {done.from_peers} of them from other readers")

    with vram.attach("model", keeper=second) as lease:  # the first node may be gone by now
        assert lease["w"].numpy()[-1] == 999_999
        print(lease.meta["revision"], "from", lease.meta["origin"])
