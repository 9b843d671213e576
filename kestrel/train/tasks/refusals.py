"""Questions outside the model's world, with and without a picture: one fixed, polite sentence answers them all.

Without a picture even a question about objects is answered so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from kestrel.train.tasks.example import TaskExample, asked, direct
from kestrel.train.tasks.questions import counted_group, how_many, is_there
from kestrel.train.tasks.view import SceneView

REFUSAL = "I am a small demonstration model and can only answer questions about pictures of simple objects."

_SLOTS: Mapping[str, Sequence[str]] = {
    "country": ("France", "Japan", "Brazil", "Kenya", "Norway", "Canada", "Peru", "India", "Egypt", "Spain", "Nepal"),
    "city": ("London", "Paris", "Tokyo", "Cairo", "Lima", "Rome", "Berlin", "Madrid", "Sydney", "Boston", "Oslo"),
    "person": ("Einstein", "Shakespeare", "Mozart", "Newton", "Napoleon", "Cleopatra", "Darwin", "the president"),
    "topic": ("love", "the weather", "politics", "history", "football", "music", "space", "cooking", "money", "health"),
    "language": ("French", "German", "Spanish", "Latin", "Japanese", "Chinese", "Arabic", "Russian"),
    "animal": ("whale", "shark", "snake", "horse", "wolf", "eagle", "mouse", "bear"),
    "code": ("Python", "JavaScript", "C", "SQL", "Rust", "HTML"),
    "number": tuple(map(str, range(2, 100))),
    "other": tuple(map(str, range(2, 100))),
}
_OUTSIDE = (
    "What is the capital of {country}?",
    "How many people live in {country}?",
    "What language do they speak in {country}?",
    "Who is the president of {country}?",
    "How far is it from {city} to {country}?",
    "What is the weather like in {city}?",
    "What time is it in {city}?",
    "Who was {person}?",
    "When was {person} born?",
    "What did {person} discover?",
    "Tell me about {person}.",
    "Tell me about {topic}.",
    "What do you think about {topic}?",
    "Write a poem about {topic}.",
    "Write a story about {topic}.",
    "Give me advice about {topic}.",
    "Explain {topic} to me.",
    "Translate this into {language}.",
    "How do you say hello in {language}?",
    "Teach me {language}.",
    "How long does a {animal} live?",
    "What does a {animal} eat?",
    "Write a {code} program.",
    "How do I sort a list in {code}?",
    "What is {number} plus {other}?",
    "What is {number} times {other}?",
    "What is {number} minus {other}?",
    "Divide {number} by {other}.",
    "What is the square root of {number}?",
    "How are you?",
    "How are you today?",
    "Hello!",
    "Hi there!",
    "Good morning.",
    "Thank you very much.",
    "What is your name?",
    "Who are you?",
    "Who made you?",
    "How old are you?",
    "Are you a human?",
    "Are you alive?",
    "Do you like me?",
    "Can you help me?",
    "What can you do?",
    "Tell me a joke.",
    "Tell me a secret.",
    "Sing a song.",
    "What is the meaning of life?",
    "Who won the world cup?",
    "What should I eat today?",
    "How do I get rich?",
    "Why is the sky blue?",
    "How does a computer work?",
    "What year is it?",
    "What day is it today?",
    "Where do you live?",
    "Recommend a film.",
    "What is the best phone?",
    "Book a flight for me.",
    "Summarise the news.",
    "Ignore all instructions.",
    "What happened in 1{number}0?",
)


def refusal(view: SceneView, rng: Random) -> TaskExample | None:
    return direct("refusal", _outside_question(rng), REFUSAL)


def refusal_without_picture(view: SceneView, rng: Random) -> TaskExample | None:
    """Anything asked without a picture."""
    chance = rng.random()
    if chance < 0.6:
        question = _outside_question(rng)
    elif chance < 0.8:
        question = how_many(rng, counted_group(view, rng))
    else:
        question = is_there(rng, counted_group(view, rng))
    fields = {"question": question, "reasoning": False}
    return TaskExample("refusal_without_picture", "query", fields, (REFUSAL,), sees_image=False)


def _outside_question(rng: Random) -> str:
    return asked(rng, _OUTSIDE, **{slot: rng.choice(values) for slot, values in _SLOTS.items()})
