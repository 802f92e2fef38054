"""A broker process with settings of the test's choice: `python -I -S lease_broker.py <directory of ddp_crossover>
<directory> <settings> <limits>`.
"""

import json
import sys

sys.path.append(sys.argv[1])

from lease.broker.holds import Limits
from lease.broker.server import Broker, BrokerSettings, log_to_file
from lease.directory import BrokerDirectory

directory = BrokerDirectory(sys.argv[2])
options = json.loads(sys.argv[3])
options["allowed_uids"] = frozenset(options.get("allowed_uids", []))
broker = Broker(directory, BrokerSettings(**options, limits=Limits(**json.loads(sys.argv[4]))))
print("serving" if broker.serving else "another one serves", flush=True)
if broker.serving:
    log_to_file(directory)
    broker.serve_forever()
