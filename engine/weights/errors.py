"""Why a model could not be loaded."""


class ModelLoadError(Exception):
    """The model's files are missing, truncated, inconsistent or of an unsupported kind. The message names file, field
    or tensor.
    """
