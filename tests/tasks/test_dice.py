"""Dice against a count by hand, and its loss against the metric."""

import pytest
import torch

from kronattn.tasks.dice import MeanDice, dice_loss


def by_hand(predicted, truth, label):
    counted = truth != 255
    shown, true = (predicted == label) & counted, (truth == label) & counted
    sizes = int(shown.sum() + true.sum())
    return None if sizes == 0 else 2 * int((shown & true).sum()) / sizes


def test_the_mean_over_samples_and_classes():
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(0, 3, (6, 4, 5), generator=generator)
    truth = torch.randint(0, 3, (6, 4, 5), generator=generator)
    truth[0, 0] = 255
    truth[1][truth[1] == 2], predicted[1][predicted[1] == 2] = 0, 0
    dice, every = MeanDice(3, 255), MeanDice(3, 255, by_class=True)
    for part in (slice(0, 2), slice(2, 6)):
        dice.update(predicted[part], truth[part])
        every.update(predicted[part], truth[part])
    expected = []
    for label in range(3):
        found = [value for p, t in zip(predicted, truth, strict=True) if (value := by_hand(p, t, label)) is not None]
        assert len(found) == (5 if label == 2 else 6)
        expected.append(sum(found) / len(found))
    assert every.compute().tolist() == pytest.approx(expected)
    assert float(dice.compute()) == pytest.approx(sum(expected[1:]) / 2)


def test_the_loss_of_sure_answers_is_one_minus_dice():
    generator = torch.Generator().manual_seed(0)
    predicted, truth = torch.randint(0, 3, (2, 1, 30), generator=generator)
    truth[0, :4] = 255
    logits = 60 * torch.nn.functional.one_hot(predicted, 3).movedim(-1, 1).float()
    expected = sum(by_hand(predicted, truth, label) for label in (1, 2)) / 2
    assert float(dice_loss(logits, truth, 255)) == pytest.approx(1 - expected, abs=1e-6)


def test_ignored_positions_have_no_gradient():
    logits = torch.randn(1, 3, 8, requires_grad=True)
    truth = torch.tensor([[0, 1, 2, 1, 255, 255, 0, 2]])
    dice_loss(logits, truth, 255).backward()
    assert (logits.grad[0, :, 4:6] == 0).all()
    assert (logits.grad[0, :, :4] != 0).any()
