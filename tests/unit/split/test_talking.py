"""A student and a teacher that exchange messages: gradients of both ends, their loss, and the bytes."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from split_servers import EXACT, connected, served
from torch import Tensor, nn

from thinwire.codecs.activation_code import ActivationCode
from thinwire.split import split_round_bytes

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from talking_models import TalkingStudent, TalkingTeacher

HIDDEN, OWN, WIDTH, TURNS, RATE = 12, 5, 16, 3, 0.1
STATES = torch.randn(4, 8, OWN, generator=torch.Generator().manual_seed(3))


def pair() -> tuple[TalkingTeacher, TalkingStudent]:
    torch.manual_seed(1)
    middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
    teacher = TalkingTeacher(middle, hidden=HIDDEN, width=WIDTH, weight=0.3)
    return teacher, TalkingStudent(nn.Identity(), hidden=OWN, width=WIDTH, turns=TURNS, weight=0.7)


def test_the_frozen_layers_stay_in_evaluation_while_the_messages_are_trained() -> None:
    teacher = TalkingTeacher(nn.Dropout(0.5), hidden=HIDDEN, width=WIDTH).eval().train()
    asked = torch.ones(2, 3, WIDTH)
    assert teacher.encoder.training and not teacher.middle.training
    assert torch.equal(teacher(asked), teacher(asked))


def own_loss(teacher: TalkingTeacher, student: TalkingStudent) -> Tensor:
    """Return the loss as the formula has it, in one process."""
    hidden, terms = STATES, []
    for _ in range(TURNS):
        asked = student.encoder(hidden)
        read = teacher.decoder(asked)
        answer = teacher.encoder(teacher.middle(read))
        learned = student.decoder(answer)
        terms += [0.7 * (student.encoder(learned) - answer).square().mean()]
        terms += [0.3 * (teacher.encoder(read) - asked).square().mean()]
        hidden = hidden + learned
    return hidden.square().mean() + torch.stack(terms).sum()


def test_both_ends_train_by_the_loss_of_one_process_and_the_teacher_itself_stays(tmp_path: Path) -> None:
    (teacher, student), (expected_teacher, expected) = pair(), pair()
    before = copy.deepcopy(teacher.middle.state_dict())
    optimizer = torch.optim.SGD([one for one in teacher.parameters() if one.requires_grad], lr=RATE)
    more = {"body": teacher, "optimizer": optimizer, "state": tmp_path / "teacher.pt"}
    with served(teacher, range(1), **more) as server, connected(server, code=EXACT) as body:
        student.body = body
        for _ in range(2):
            hidden, term = student(STATES)
            (hidden.square().mean() + term).backward()
            body.step()
            own_loss(expected_teacher, expected).backward()
            for found, wanted in ((student.encoder, expected.encoder), (student.decoder, expected.decoder)):
                torch.testing.assert_close(found.weight.grad, wanted.weight.grad, rtol=1e-5, atol=1e-8)
                found.zero_grad(), wanted.zero_grad()
            for one in (expected_teacher.encoder, expected_teacher.decoder):
                for parameter in one.parameters():
                    assert parameter.grad is not None and parameter.grad.any()
                    with torch.no_grad():
                        parameter -= RATE * parameter.grad
            expected_teacher.zero_grad()
    for name, value in expected_teacher.state_dict().items():
        torch.testing.assert_close(teacher.state_dict()[name], value, rtol=1e-5, atol=1e-7)
    assert all(torch.equal(value, before[name]) for name, value in teacher.middle.state_dict().items())


def test_bytes_are_two_messages_a_turn_and_as_many_for_gradients(tmp_path: Path) -> None:
    teacher, student = pair()
    code, samples = ActivationCode("block-int8", "block-int8"), STATES[..., 0].numel()
    with served(teacher, range(1), body=teacher) as server, connected(server, code=code) as body:
        student.body = body
        with torch.no_grad():
            student(STATES)
        asked = sum(body.sent_bytes.values()) + sum(body.received_bytes.values())
        # a scale of 4 bytes for 256 numbers
        assert asked == samples * 2 * TURNS * (WIDTH + WIDTH / 64)
        hidden, term = student(STATES)
        (hidden.sum() + term).backward()
        trained = sum(body.sent_bytes.values()) + sum(body.received_bytes.values()) - asked
        assert trained == TURNS * split_round_bytes(samples=1, positions=samples, width=WIDTH, code=code) == 2 * asked


def test_wrong_numbers_are_refused() -> None:
    for arguments in ({"width": 0}, {"width": 4, "turns": 0}):
        with pytest.raises(ValueError, match=r"got (width|turns)=0; allowed 1 or more"):
            TalkingStudent(nn.Identity(), hidden=OWN, **arguments)
    with pytest.raises(ValueError, match="got width=0; allowed 1 or more; try width=32"):
        TalkingTeacher(nn.Identity(), hidden=OWN, width=0)
