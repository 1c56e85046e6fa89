"""`train_clips.py`, which readers take home: its numbers beside plain loops."""

import sys

import numpy as np
import pytest
import soundfile
import torch
from support.notebooks import tones

from helpers import config


@pytest.fixture
def script(monkeypatch):
    """The module, and `recipes` beside it."""
    monkeypatch.syspath_prepend(config.PROJECT / "notebooks")
    yield __import__("train_clips")
    for name in ("recipes", "train_clips"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return tones(tmp_path_factory.mktemp("clips"))


def test_an_epoch_has_the_same_cuts_in_any_worker_and_another_epoch_has_others(script, clips):
    import recipes

    paths = sorted((clips / "train" / "1").glob("*.flac"))
    dataset = script.Cuts(paths, list(range(len(paths))), 2000)
    whole = [soundfile.read(path, dtype="int16")[0] for path in paths]

    def cuts(workers, epoch):
        loader = recipes.loader_that_resumes(dataset, 4, workers, order=recipes.WithEpoch)
        loader.sampler.set_epoch(0)
        list(loader)  # persistent workers must not stay in this epoch
        loader.sampler.set_epoch(epoch)
        return [(int(n), cut) for batch, labels in loader for cut, n in zip(batch, labels, strict=True)]

    first, other = cuts(0, 1), cuts(0, 2)
    assert all(torch.equal(mine, its) for (_, mine), (_, its) in zip(first, cuts(2, 1), strict=True))
    assert [n for n, _ in first] != [n for n, _ in other]
    begins = {epoch: dict(places(found, whole)) for epoch, found in ((1, first), (2, other))}
    assert begins[1].keys() == begins[2].keys() and begins[1] != begins[2]
    for number, cut in ((number, dataset[number][0]) for number in range(len(paths))):  # to validate: the middle
        spare = len(whole[number]) - 2000
        assert np.array_equal(cut, whole[number][spare // 2 :][:2000])


def places(cuts, whole):
    """Yield the number of each clip, and where its cut begins in the whole clip: found by looking everywhere."""
    for number, cut in cuts:
        windows = np.lib.stride_tricks.sliding_window_view(whole[number], 2000)
        (begin, *_) = np.flatnonzero((windows == cut.numpy()).all(axis=1))
        yield number, begin


@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "DOUBLE"])
def test_samples_are_read_in_their_own_scale_whatever_a_file_stores(script, tmp_path, subtype):
    wave = 0.5 * np.sin(np.arange(800) / 7)
    soundfile.write(tmp_path / "a.wav", np.stack([wave, wave / 2], axis=1), 8000, subtype=subtype)
    cut = script.Cuts([tmp_path / "a.wav"], [0], 800)[0][0].numpy()
    np.testing.assert_allclose(cut, 0.75 * wave * 2**15, atol=3)


def test_a_file_that_is_not_there_is_no_silence_and_no_clip_to_read_is_said(script, tmp_path, capsys):
    with pytest.raises(soundfile.LibsndfileError):
        script.Cuts([tmp_path / "a.wav"], [0], 800)[0]
    (tmp_path / "b.wav").write_text("no sound")
    assert script.readable([tmp_path / "b.wav"]) == (0, [False])
    assert "b.wav: damaged" in capsys.readouterr().out


def test_a_clip_that_is_short_or_damaged_ends_in_silence_and_channels_are_averaged(script, tmp_path):
    samples = np.arange(1, 301, dtype=np.int16)
    soundfile.write(tmp_path / "stereo.wav", np.stack([samples, 3 * samples], axis=1), 8000)
    (tmp_path / "damaged.flac").write_bytes(b"fLaC" + bytes(40))
    dataset = script.Cuts([tmp_path / "stereo.wav", tmp_path / "damaged.flac"], [0, 1], 500)
    assert np.array_equal(dataset[3, 0][0], [*(2 * samples), *[0] * 200])
    with pytest.warns(UserWarning, match=r"damaged clip: .*damaged\.flac"):
        assert not dataset[3, 1][0].any()
    most, readable = script.readable([tmp_path / "stereo.wav", tmp_path / "damaged.flac"])
    assert (most, readable) == (8000, [True, False])


def test_a_spectrogram_is_that_of_a_plain_loop_in_float32_also_under_autocast(script):
    samples = (1000 * torch.randn(2, 3000, generator=torch.Generator().manual_seed(0))).to(torch.int16)
    layer = script.Spectrogram(8000, bands=8, window=0.032, hop=0.02)
    found = layer(samples)
    padded = np.pad(samples.numpy() / 2**15, ((0, 0), (128, 128)), "reflect")
    window = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    pitch = 2595 * np.log10(1 + np.fft.rfftfreq(256, 1 / 8000) / 700)
    edges = np.linspace(0, pitch[-1], 10)
    for clip in range(2):
        for frame in range(found.shape[3]):
            power = np.abs(np.fft.rfft(window * padded[clip, 160 * frame :][:256])) ** 2
            for band in range(8):
                low, middle, high = edges[band : band + 3]
                weights = np.interp(pitch, [low, middle, high], [0, 1, 0])
                assert found[clip, 0, band, frame] == pytest.approx(np.log(weights @ power + 1e-6), abs=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(samples), found) and found.dtype == torch.float32


def test_masks_hide_one_stripe_of_each_axis_in_each_spectrogram_and_none_to_validate(script):
    torch.manual_seed(0)
    layer, spectrograms = script.Masks(), torch.ones(64, 1, 40, 100)
    for one in layer(spectrograms)[:, 0]:
        bands, frames = (one == 0).all(dim=1), (one == 0).all(dim=0)
        for hidden, most in ((bands, 10), (frames, 25)):
            (places,) = torch.where(hidden)
            assert len(places) <= most and (places.diff() == 1).all()
        assert ((one == 0) == (bands[:, None] | frames)).all()
    assert 0.05 < (layer(spectrograms) == 0).float().mean() < 0.4
    assert torch.equal(layer.eval()(spectrograms), spectrograms)


def test_of_a_spectrogram_with_one_channel_the_weights_choose_the_layout(script):
    spectrogram = torch.rand(4, 1, 32, 50)
    assert all(spectrogram.is_contiguous(memory_format=each) for each in (torch.contiguous_format, torch.channels_last))
    convolution = torch.nn.Conv2d(1, 8, 3)
    assert convolution(spectrogram).is_contiguous()
    convolution.to(memory_format=torch.channels_last)
    assert convolution(spectrogram).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_learns_to_tell_low_tones_from_high_ones_and_records(script, clips, tmp_path, monkeypatch, capsys):
    arguments = ["--epochs", "20", "--batch", "8", "--lr", "1", "--seconds", "0.4", "--workers", "0", "1"]
    monkeypatch.setattr(sys, "argv", ["train_clips.py", str(clips), str(tmp_path), *arguments])
    script.main()
    printed = capsys.readouterr().out
    assert printed.count("\nepoch ") == 20 and "100.0% right" in printed.splitlines()[-1]
    assert list((tmp_path / "trace").glob("*.pt.trace.json"))
