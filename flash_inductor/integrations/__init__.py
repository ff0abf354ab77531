"""Other libraries: each module is imported by its user (or its library's import), none by ``import flash_inductor``."""
