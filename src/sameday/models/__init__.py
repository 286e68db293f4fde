"""The models, each as a thin layer over its library's own modules."""

import logging

# bitsandbytes, which PEFT loads where it is installed, says on every CPU that an extra of its own is not.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
