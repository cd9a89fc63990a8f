"""Streaming form of hibari's signal processing: frames of a phrase come in pieces, samples leave as early as the
windows allow, and the joined pieces equal the one-shot synthesis (boundary clicks: R20, R22).

Per phrase: pulse train from f0 -> STFT -> filter, plus shaped noise, plus residual -> inverse STFT. Output block j
(300 samples) needs spectrum frames up to j+2, which need f0 up to j+5; that is the whole latency, 62 ms.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hibari import dsp

from omni_runtime.stages.hibari.acoustic import SPECTRA

HOP: int = dsp.HOP
N_FFT: int = dsp.N_FFT
SAMPLE_RATE: int = dsp.SR
BLOCKS = N_FFT // HOP  # hops under one window
HALF = N_FFT // 2
VOICED_HZ = 40.0  # below: no pulses
MAX_HARMONIC_HZ = 11000.0


class Noise:
    """Complex white noise, frame by frame, from the request's seed: the chunk size does not change the audio."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def frames(self, count: int, bins: int) -> np.ndarray:
        """complex64 [count, bins]"""
        normal = self._generator.standard_normal((count, 2 * bins), dtype=np.float32)
        return np.asarray(normal.view(np.complex64))


class Excitation:
    """Band-limited pulse train of an f0 curve that arrives in pieces.

    The running sum of f0 is carried in float64 and continued in order, so the phase is bit-equal to a sum from the
    phrase's start.
    """

    def __init__(self) -> None:
        self._curve = np.zeros(0, np.float32)  # frames not yet rendered, with one rendered frame before them
        self._first = True
        self._sum = 0.0

    def extend(self, f0: np.ndarray, *, last: bool) -> np.ndarray:
        """float32 samples of all frames whose right neighbour is known; at the end of the phrase, of all frames."""
        curve = np.concatenate([self._curve, f0])
        if self._first and curve.size:
            curve = np.concatenate([curve[:1], curve])  # edge padding on the left
            self._first = False
        if last and curve.size:
            curve = np.concatenate([curve, curve[-1:]])
        frames = curve.size - 2
        if frames <= 0:
            self._curve = curve
            return np.zeros(0, np.float32)
        self._curve = curve[-2:]
        return self._render(curve, frames)

    def _render(self, curve: np.ndarray, frames: int) -> np.ndarray:
        half = HOP // 2
        u, v = dsp._interp_w()
        f = np.empty((frames, HOP), np.float32)
        np.multiply(curve[:-2, None], v[:half], out=f[:, :half])
        f[:, :half] += curve[1:-1, None] * u[:half]
        np.multiply(curve[1:-1, None], v[half:], out=f[:, half:])
        f[:, half:] += curve[2:, None] * u[half:]
        hz = f.reshape(-1)
        voiced = hz > VOICED_HZ
        np.maximum(hz, VOICED_HZ, out=hz)
        cycles = np.cumsum(np.concatenate([[self._sum], hz]), dtype=np.float64)[1:]
        self._sum = float(cycles[-1])
        cycles *= 1.0 / SAMPLE_RATE
        np.modf(cycles, cycles)
        cycles *= 2 * np.pi
        t = cycles.astype(np.float32)
        order = np.floor(MAX_HARMONIC_HZ / hz) + np.float32(0.5)
        sine = np.sin(t * 0.5)
        sine *= 2
        at_limit = np.abs(sine) <= 2e-3
        pulses = np.sin(order * t)
        sine[at_limit] = 1
        pulses /= sine
        pulses[at_limit] = order[at_limit]
        pulses -= 0.5
        pulses[~voiced] = 0
        return np.asarray(pulses, np.float32)


class PhraseSynthesis:
    """One phrase. `push` takes frames [n, bins] per spectrum and f0 [n], and returns the samples that are final."""

    def __init__(self, noise: Noise) -> None:
        self._noise = noise
        self._excitation = Excitation()
        self._pulses = np.zeros(0, np.float32)  # from the left edge of the next spectrum's window on
        self._opened = False  # the reflected left edge is in place
        self._frames: list[dict[str, np.ndarray]] = []  # spectra that wait for their pulses
        self._windows = np.zeros((0, BLOCKS, HOP), np.float32)  # the last windows that reach into coming blocks
        self._windows_before = 0  # windows that have left `_windows`
        self._blocks = 0  # output blocks that have left

    def push(self, spectra: dict[str, np.ndarray], f0: np.ndarray, *, last: bool) -> np.ndarray:
        """float32 samples, 300 a frame. With `last`, everything that is left."""
        if f0.shape[0]:
            self._frames.append({n: np.asarray(spectra[n], np.float32) for n in SPECTRA})
        self._append_pulses(self._excitation.extend(np.asarray(f0, np.float32), last=last), last)
        self._transform(self._take_ready())
        return self._emit(last)

    def _append_pulses(self, pulses: np.ndarray, last: bool) -> None:
        self._pulses = np.concatenate([self._pulses, pulses])
        if not self._opened and (last or self._pulses.size > HALF):
            left = np.pad(self._pulses, (HALF, 0), mode="reflect") if self._pulses.size > 1 else self._pulses
            self._pulses, self._opened = left, True
        if last and self._opened and self._pulses.size > 1:
            self._pulses = np.pad(self._pulses, (0, HALF), mode="reflect")

    def _take_ready(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Frames whose window is complete, with their windows [n, N_FFT]."""
        waiting = sum(f["lh"].shape[0] for f in self._frames)
        count = 0 if not self._opened else max(0, min(waiting, (self._pulses.size - N_FFT) // HOP + 1))
        if count == 0:
            return {}, np.zeros((0, N_FFT), np.float32)
        joined = {n: np.concatenate([f[n] for f in self._frames]) for n in SPECTRA}
        self._frames = [{n: joined[n][count:] for n in SPECTRA}] if waiting > count else []
        windows = np.lib.stride_tricks.sliding_window_view(self._pulses, N_FFT)[::HOP][:count] * dsp.WIN_SRC
        self._pulses = self._pulses[count * HOP :]
        return {n: joined[n][:count] for n in SPECTRA}, windows

    def _transform(self, ready: tuple[dict[str, np.ndarray], np.ndarray]) -> None:
        frames, windows = ready
        if not frames:
            return
        spectrum: Any = dsp.rfft(windows, 1)  # complex64 [n, bins]
        spectrum *= _polar(dsp.ex(frames["lh"]), np.tanh(frames["th"]) * np.float32(np.pi))
        noise = self._noise.frames(*frames["ln"].shape)
        noise *= dsp.ex(frames["ln"])
        spectrum += noise
        spectrum += _polar(dsp.ex(frames["lr"]), frames["phi"])
        samples = dsp.irfft(spectrum, N_FFT, 1)
        samples *= dsp.WIN
        self._windows = np.concatenate([self._windows, samples.reshape(-1, BLOCKS, HOP)])

    def _emit(self, last: bool) -> np.ndarray:
        """Overlap-add. Output block j is block j+2 of the padded signal, under windows j-1 .. j+2."""
        known = self._windows_before + self._windows.shape[0]
        end = known if last else max(self._blocks, known - BLOCKS // 2)
        count = end - self._blocks
        if count <= 0:
            return np.zeros(0, np.float32)
        out = np.zeros((count, HOP), np.float32)
        weight = np.zeros((count, HOP), np.float32)
        squares = (dsp.WIN * dsp.WIN).reshape(BLOCKS, HOP)
        for k in range(BLOCKS):
            first = self._blocks + BLOCKS // 2 - k  # the window whose part k lies in output block `self._blocks`
            low, high = max(first, 0), min(first + count, known)
            if low >= high:
                continue
            rows = slice(low - first, high - first)
            out[rows] += self._windows[low - self._windows_before : high - self._windows_before, k]
            weight[rows] += squares[k]
        out *= 1.0 / np.maximum(weight, 1e-11)
        self._blocks = end
        keep_from = max(self._windows_before, self._blocks - 1)
        self._windows = self._windows[keep_from - self._windows_before :]
        self._windows_before = keep_from
        return out.reshape(-1)


def _polar(magnitude: np.ndarray, angle: np.ndarray) -> np.ndarray:
    out = np.empty(angle.shape, np.complex64)
    np.cos(angle, out=out.real)
    np.sin(angle, out=out.imag)
    out *= magnitude
    return out
