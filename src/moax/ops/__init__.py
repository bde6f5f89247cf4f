"""The ops of a block. Each op is one file and has its own partition rule, so that it runs on any mesh."""

from moax.ops.activation import activate as activate
from moax.ops.balance import update_router_bias as update_router_bias
from moax.ops.chunks import sort_chunks as sort_chunks
from moax.ops.exchange import combine as combine
from moax.ops.exchange import dispatch as dispatch
from moax.ops.linear import dense as dense
from moax.ops.logits import router_logits as router_logits
from moax.ops.permutation import permute as permute
from moax.ops.permutation import unpermute as unpermute
from moax.ops.products import grouped_matmul as grouped_matmul
from moax.ops.quantization import dequantize as dequantize
from moax.ops.quantization import quantize as quantize
from moax.ops.routing import route as route
from moax.ops.wgrad import grouped_wgrad as grouped_wgrad
