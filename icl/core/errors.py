"""What the core and the backends refuse; each class names one remedy."""


class SpecError(ValueError):
    """A spec that cannot be used; `faults` holds one message for each thing wrong with it."""

    def __init__(self, *faults: str) -> None:
        super().__init__("\n".join(faults))
        self.faults = faults


class BackendUnavailableError(RuntimeError):
    """A backend was asked for whose name, package, driver or device is not there, or that cannot obey the spec."""


class NonFiniteLossError(ArithmeticError):
    """Training reached a loss or parameters that are not finite; what was saved before stays as it is."""
