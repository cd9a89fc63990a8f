"""Builds the images of a checkout: `omni image build`.

What is decided (names, tiers, what is skipped) is in `plan`; the container engines are in `engines`; the rest prepares the
folders that a build needs. Nothing here is part of an image.
"""
