"""Exchange: tokens travel to the ranks that own their experts, and sums of those ranks' results travel back.

| file           | contents                                                                        |
|----------------|---------------------------------------------------------------------------------|
| `op`           | `dispatch` and `combine`, their forward and backward of one device, their costs   |
| `plan`         | which token travels in which slot, and where its row lies on the other rank       |
| `wire`         | the quantization of rows on the wire, to one byte an element                      |
| `transport`    | the protocol of a transport                                                       |
| `table`        | the transports by name                                                            |
| `all_gather`   | the transport that sends every token to every rank                                |
| `all_to_all`   | the transport with equally many slots for each pair of ranks                      |
| `one_sided`    | the transport whose kernel writes rows into the memory of peers                   |

A new transport is one file like `all_gather.py` and one line in `table.py`.
"""

from moax.ops.exchange.op import combine as combine
from moax.ops.exchange.op import combine_backward as combine_backward
from moax.ops.exchange.op import combine_backward_cost as combine_backward_cost
from moax.ops.exchange.op import combine_cost as combine_cost
from moax.ops.exchange.op import combine_forward as combine_forward
from moax.ops.exchange.op import dispatch as dispatch
from moax.ops.exchange.op import dispatch_backward as dispatch_backward
from moax.ops.exchange.op import dispatch_backward_cost as dispatch_backward_cost
from moax.ops.exchange.op import dispatch_cost as dispatch_cost
from moax.ops.exchange.op import dispatch_forward as dispatch_forward
from moax.ops.exchange.op import exchange_bytes as exchange_bytes
from moax.ops.exchange.plan import allot_slots as allot_slots
from moax.ops.exchange.plan import slots_per_pair as slots_per_pair
from moax.ops.exchange.table import AUTO as AUTO
from moax.ops.exchange.table import EXCHANGES as EXCHANGES
from moax.ops.exchange.table import TRANSPORTS as TRANSPORTS
from moax.ops.exchange.table import Exchange as Exchange
from moax.ops.exchange.table import find_transport as find_transport
from moax.ops.exchange.table import refuse as refuse
from moax.ops.exchange.table import select_transport as select_transport
from moax.ops.exchange.transport import CombineSpec as CombineSpec
from moax.ops.exchange.transport import ExchangeSpec as ExchangeSpec
from moax.ops.exchange.transport import Transfer as Transfer
from moax.ops.exchange.transport import Transport as Transport
from moax.ops.exchange.transport import collective as collective
from moax.ops.exchange.wire import wire_bytes as wire_bytes
