"""How a program of moax runs: which devices JAX starts on, what an error prints, and with which code it exits.

Exit codes: 0 done, 1 it cannot run here, 2 wrong arguments, 130 stopped by Ctrl-C, 141 nobody reads what it prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from moax import extras
from moax.errors import Unsupported


def run(name: str, act: Callable[[], int], *, traceback: bool = False) -> int:
    """act(), with an expected error printed in one line as `NAME: error: MESSAGE`.

    Args:
      name: the program as the user typed it, such as `moax train`.
      act: does the work and returns the exit code.
      traceback: raise an expected error, so that Python shows where it arose.

    Returns:
      The exit code.
    """
    try:
        code = act()
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # as in `moax info | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout when it ends
        return leave(141)
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return leave(130)
    except Exception as error:
        if traceback or (found := explain(error)) is None:
            raise
        message, code = found
        print(f"{name}: error: {message}", file=sys.stderr)
        return leave(code)


def explain(error: Exception) -> tuple[str, int] | None:
    """(message, exit code) of an error that the user can mend; None for a bug, which keeps its traceback."""
    if isinstance(error, ModuleNotFoundError):
        said = extras.hint(error)
        return None if said is None else (said, 1)
    if isinstance(error, ValueError | Unsupported | OSError) or _is_of_jax(error):
        code = 2 if isinstance(error, ValueError) else 1
        return f"{str(error).strip() or type(error).__name__}{hint(error)}", code
    return None


def start(cpu_devices: int | None = None) -> None:
    """Starts JAX, on that many emulated devices if a number is given.

    Raises:
      Unsupported: JAX has no device to run on. ValueError: see `emulate`.
    """
    import jax

    if cpu_devices is not None:
        emulate(cpu_devices)
    try:
        jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that one of the platforms it was told to use is here
        why = str(error).strip() or f"none of its platforms ({jax.config.jax_platforms}) is here"
        raise Unsupported(f"JAX cannot start: {why}") from error


def emulate(count: int) -> None:
    """Makes JAX run on `count` emulated CPU devices; must come before anything runs.

    Raises:
      ValueError: JAX already runs on another number of devices.
    """
    import jax

    if count < 1:
        raise ValueError(f"--cpu-devices {count} must be at least 1")
    # Many devices on few cores: a rendezvous may take longer than the 40 seconds after which XLA gives up.
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=600".strip()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started already: its devices are counted below.
    if (here := jax.local_device_count()) != count:
        raise ValueError(f"--cpu-devices {count}: JAX already runs in this process, on {here} devices")


def leave(code: int) -> int:
    """The code to exit with. One of several processes ends here: an orderly exit waits for all processes, and a process
    that still runs waits for this one."""
    if _is_one_of_several():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def hint(error: Exception) -> str:
    """What an error of JAX may mean where this is one of several processes."""
    return "; another process may be gone: see what it said" if _is_of_jax(error) and _is_one_of_several() else ""


def _is_of_jax(error: Exception) -> bool:
    """Whether JAX raised the error for want of memory, of a device or of a peer; no JAX, no such error."""
    if "jax" not in sys.modules:
        return False
    from jax.errors import JaxRuntimeError

    return isinstance(error, JaxRuntimeError)


def _is_one_of_several() -> bool:
    """Whether JAX is loaded, and connects this process to others."""
    if "jax" not in sys.modules:
        return False
    import jax

    return jax.distributed.is_initialized()
