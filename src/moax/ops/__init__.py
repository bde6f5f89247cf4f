"""The ops of a block. Each op is one file and has its own partition rule, so that it runs on any mesh."""

from moax.ops.activation import activate as activate
from moax.ops.balance import load_metrics as load_metrics
from moax.ops.balance import update_router_bias as update_router_bias
from moax.ops.dispatch_combine import combine as combine
from moax.ops.dispatch_combine import dispatch as dispatch
from moax.ops.matmul import dense as dense
from moax.ops.matmul import grouped_matmul as grouped_matmul
from moax.ops.permutation import permute as permute
from moax.ops.permutation import unpermute as unpermute
from moax.ops.router import route as route
from moax.ops.router import router_logits as router_logits
