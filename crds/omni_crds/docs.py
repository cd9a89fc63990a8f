"""The API reference, generated from the types. Filled in below."""


def render_reference() -> str:
    return ""
