from __future__ import annotations

from itertools import islice

import pytest
import torch

from benchmarks.methods.images import NUM_TEST, accuracy, batches, convnet, load_digits, loss, train


def test_the_split_is_the_same_for_a_seed_and_holds_every_image_once() -> None:
    one, again, other = load_digits(seed=3), load_digits(seed=3), load_digits(seed=4)
    assert torch.equal(one.train_images, again.train_images) and torch.equal(one.test_labels, again.test_labels)
    assert not torch.equal(one.test_images, other.test_images)
    assert len(one.test_labels) == NUM_TEST and one.train_images.shape == (1797 - NUM_TEST, 1, 8, 8)
    sums = [
        torch.cat([split.train_images, split.test_images]).double().sum((1, 2, 3)).sort()[0] for split in (one, other)
    ]
    assert torch.equal(*sums)
    assert float(one.train_images.min()) >= 0 and float(one.train_images.max()) == 1
    assert set(one.test_labels.tolist()) == set(range(10))


def test_a_seed_says_all_of_a_model_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    one, again, other = convnet(seed=1), convnet(seed=1), convnet(seed=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one[0].weight, again[0].weight) and not torch.equal(one[0].weight, other[0].weight)


def test_batches_hold_every_sample_once_an_epoch_in_a_new_order() -> None:
    labels = torch.arange(10)
    drawn = [targets for _, targets in islice(batches(labels, labels, batch_size=3), 6)]
    epochs = torch.cat(drawn[:3]), torch.cat(drawn[3:])
    assert all(len(set(epoch.tolist())) == 9 for epoch in epochs)
    assert not torch.equal(*epochs)
    with pytest.raises(ValueError, match="batch_size must be in 1 to 10 samples, got 11"):
        next(batches(labels, labels, batch_size=11))


def test_a_short_training_learns_the_digits_and_repeats_bit_for_bit() -> None:
    digits = load_digits()
    models = [convnet(width=8), convnet(width=8)]
    test = digits.test_images, digits.test_labels
    assert accuracy(models[0], *test) < 0.3
    for model in models:
        train(model, digits.train_images, digits.train_labels, steps=60)
        assert model.training  # measuring below keeps the mode
    assert accuracy(models[0], *test) > 0.9 and loss(models[0], *test) < 0.5
    assert models[0].training
    assert all(torch.equal(one, two) for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True))
