"""The ops of a block, one file each; every one runs on any mesh by its own partition rule."""

from moax.ops.activation import activate as activate
from moax.ops.balance import update_router_bias as update_router_bias
from moax.ops.dense import dense as dense
from moax.ops.exchange import combine as combine
from moax.ops.exchange import dispatch as dispatch
from moax.ops.grouped_matmul import grouped_matmul as grouped_matmul
from moax.ops.permute import permute as permute
from moax.ops.permute import unpermute as unpermute
from moax.ops.quantize import dequantize as dequantize
from moax.ops.quantize import quantize as quantize
from moax.ops.route import route as route
from moax.ops.router import router_logits as router_logits
