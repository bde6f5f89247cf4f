"""The cost of MoE blocks on a mesh: memory of a device, bytes on each wire, and time of each stage.

    seconds = layers * sum over stages of (max(flops / rate, bytes of device memory / rate), or bytes / rate of a wire)

Nothing is compiled. The bytes on wires equal those of the compiled program (`moax.inspect`). The kernel of `one_sided`
moves only the rows that exist, so that its bytes are those of the balanced load. The times assume the balanced load and
rates that kernels reach; no stages overlap, and a launch costs nothing. Compare meshes by these times, and measure the
mesh that you choose.
"""

from moax.estimate.hardware import HARDWARE as HARDWARE
from moax.estimate.hardware import Hardware as Hardware
from moax.estimate.memory import Memory as Memory
from moax.estimate.report import Estimate as Estimate
from moax.estimate.report import estimate as estimate
from moax.estimate.report import sweep as sweep
from moax.estimate.times import Stage as Stage
from moax.estimate.wires import Transfer as Transfer
from moax.models import MODELS as MODELS
