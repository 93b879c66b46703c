"""DFlash block-diffusion speculative decoding in JAX/Flax."""

from dflash_jax.version import __version__ as __version__
