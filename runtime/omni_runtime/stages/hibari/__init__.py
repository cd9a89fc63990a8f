"""smol_omni's voice: acoustic net (text segments -> spectral frames) and vocoder (frames -> PCM). Free of torch."""
