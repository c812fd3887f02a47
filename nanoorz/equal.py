"""Is an answer equal to its label? Quick rules, and a worker process for algebra.

`quick_verdict` applies rules that take linear time. If no rule decides, a `Worker` asks a process
that runs algebra.py. The process may crash, and the trainer goes on.
"""

import contextlib
import json
import math
import os
import re
import signal
import sys
import unicodedata
from fractions import Fraction
from multiprocessing.connection import wait
from subprocess import PIPE, Popen

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# A longer text equals only the same text. The reason: two texts, at most 12 bytes of JSON for each
# character, must fit into a pipe of 64 KB. A write of more would hang if the process hangs.
MAX_TEXT = 2_500

# ---- spellings: what can be written in many ways gets one spelling -------------------------------

# How to read the patterns of this file: the comment above a pattern shows texts that the pattern
# takes, and behind an arrow what becomes of them. Many patterns share these parts:
#   (?=x)    (?!x)     x follows, or x does not follow.
#   (?<=x)   (?<!x)    x stands before, or x does not stand before.
#   (?![A-Za-z])       No letter follows, so the name of a LaTeX command ends here.
#   " ?"               There may be a space.
#   [^{}]*             Any text without braces.

# {character of Unicode: LaTeX}
CHARACTERS = {
    "−": "-",
    "–": "-",
    "\u2010": "-",
    "⋅": "\\cdot ",
    "÷": "/",
    "∶": ":",
    "≈": "\\approx ",
    "⟨": "(",
    "⟩": ")",
    "×": "\\times ",
    "·": "\\cdot ",
    "π": "\\pi ",
    "∞": "\\infty ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "°": "^\\circ ",
    "∪": "\\cup ",
    "∈": "\\in ",
    "±": "\\pm ",
    "≠": "\\ne ",
}
# Unicode's raised and lowered characters: {pattern of a run: LaTeX's sign}
RAISED = {}
for sign, tag in (("^", "<super>"), ("_", "<sub>")):
    found = [x for x in map(chr, range(0x80, 0x2100)) if tag in unicodedata.decomposition(x)]
    found = [x for x in found if x != "º"]  # a degree
    RAISED["[" + "".join(found) + "]+"] = sign
# Characters that nobody sees, such as marks of the writing direction.
INVISIBLE = re.compile(r"[\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")

# 5    1.5    1,234.5
WHOLE = r"[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?"
POWERS = {"thousand": r"\1e3\2", "million": r"\1e6\2", "billion": r"\1e9\2", "trillion": r"\1e12\2"}
# {pattern: replacement}, in the order of use. A pattern may rely on those before it: after the
# pattern of \dfrac, for example, each fraction is a \frac. All of them take a few milliseconds for
# MAX_TEXT.
REWRITES = {
    # Markdown around a part: **73** -> 73    __73__ -> 73    `73` -> 73    but 2**3**2 stays
    r"(?<![\w)*])(\*{1,3}|__|`+)(?=[^\s*`])([^*`\n]+?)(?<![\s*`_])\1(?![\w(*])": r"\2",
    # Powers: x**12 -> x^{12}    10^(-5) -> 10^{-5}
    r"(?<=[\w)}])\*\*(-?[0-9]+|[A-Za-z]|\([^()]*\))|\^ ?\(([^()]*)\)": r"^{\1\2}",
    # What is left of markdown at an end: 73** -> 73
    r"^\*\*|\*\*$": "",
    # The base 10 at the end: 5_{10} -> 5    5_10 -> 5
    r"(?<=[0-9])_(?:10|\{10\})(?=\W*$)": "",
    # \approx8.24 -> 8.24
    r"^\\approx": "",
    # 40 (base 9) -> 40_{9}    40\text{ base }9 -> 40_{9}
    r"(?<=[0-9A-Fa-f)]) ?(?:\\text\{)? ?\(? ?(?:in )?base[ }]*([0-9]{1,2})[ )}]*$": r"_{\1}",
    # Commands of layout: {\bf 42} -> { 42}    \textcolor{red}{42} -> {42}
    r"\\(?:displaystyle|[lL]arge|bf|(?:text)?color ?\{[a-z]+\})(?![A-Za-z])": "",
    # Sizes of brackets: \left( -> (    \bigr] -> ]    \right. -> nothing
    r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])\.?": "",
    # \dfrac -> \frac    \tfrac -> \frac    \cfrac -> \frac
    r"\\[dtc]frac": r"\\frac",
    # A negative space and dollars: 10,\! 080 -> 10,080    \$42 -> 42    $x$ -> x
    r"\\!\s*|\\?\$|\\textdollar(?![a-z]) ?": "",
    # What held a dollar: \text{\$} -> \text{} -> nothing    USD 5 -> 5
    r"\\(?:text|mathrm|mbox) ?\{ *\}|^(?:\\text ?\{ ?)?USD\b ?\}? ?": "",
    # Fonts and frames: \mathbf{x} -> {x}    \boxed{42} -> {42}
    r"\\(?:boldsymbol|bm|pmb|math(?:bf|it|sf)|underline|boxed) ?(?=\{)": "",
    # A formula that is the whole text: \[5\] -> 5    \(x+1\) -> x+1
    r"(?s)^\\[\[(]((?:(?!\\[()\[\]]).)*)\\[\])]$": r"\1",
    # All spaces become one: 10\,080 -> 10 080    1\quad2 -> 1 2    1~2 -> 1 2
    r"(?:(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s)+": " ",
    # \mathrm{x} -> x    A letter of the list may be a unit, such as \mathrm{m}, and stays.
    r"\\mathrm ?\{(?![mgshlACFJKLNVW])([A-Za-z])\}": r"\1",
    # \mathrm{cm} -> \text{cm}    \mbox{cm} -> \text{cm}    \textbf{(C)} -> \text{(C)}
    r"\\(?:mathrm|mbox|text(?:bf|it|rm|sf|tt|normal)|emph) ?(?=\{)": r"\\text",
    # Braces around the whole text: {42} -> 42    \text{72 clips} -> 72 clips
    r"^ ?(?:\\text ?\{ ?(?=-?\.?[0-9])|\{)((?:[^{}]|\{[^{}]*\})*)\} ?$": r"\1",
    # Braces around a number at the start: {480} eggs -> 480 eggs
    r"^ ?\{(-?[0-9.,]+)\}": r"\1",
    # Times of day: 8:34 \text{ p.m.} -> 8:34pm    8:34 PM -> 8:34Pm (words have no case later)
    r"(?<=[0-9]) ?(?:\\text\{ ?)?([AaPp])\.? ?[Mm](?![A-Za-z])\.? ?\}?$": r"\1m",
    # Degrees: 90^\circ -> 90    90^{\circ} -> 90    30^\circ C -> 30
    r"\^ ?(?:\{ ?\\(?:circ|degree) ?\}|\\circ)(?![A-Za-z])(?:\{\})?(?: ?[CF]$)?": "",
    # 90\degree -> 90
    r"\\degree(?![A-Za-z])": "",
    # 50\% -> 50%
    r"\\%": "%",
    # 50\text{ percent} -> 50%    50\text{ per cent} -> 50%
    r" ?\\text\{ ?(?:per ?cent|pct|%) ?\}": "%",
    # 50 percent -> 50%    50 per cent -> 50%    50pct -> 50%
    r" ?(?<![A-Za-z])(?:per ?cent|pct)(?![A-Za-z])": "%",
    # Lists get commas: 1 \text{ or } 2 -> 1, 2    1\text{, and }2 -> 1, 2
    r",? ?\\text\{,? ?(?:or|and) ?\} ?": ", ",
    # 1, 2, and 3 -> 1, 2, 3    (1,2)or(3,4) -> (1,2), (3,4)
    r",? ?\b(?:or|and)\b ?": ", ",
    # 5 million -> 5e6    5\text{ million} -> 5e6    5\text{ million dollars} -> 5e6\text{ dollars}
    # but 1/2 million stays
    **{
        rf"(?i)(?<![/:.,0-9])({WHOLE}) ?(?:\\text\{{ ?{word} ?\}}|(\\text\{{)? ?{word}\b)": power
        for word, power in POWERS.items()
    },
    # A ratio: 3 to 2 -> 3/2    3\text{ to }2 -> 3/2
    r"^([0-9.]+) ?(?:\\text\{ ?to ?\}|to) ?([0-9.]+)$": r"\1/\2",
    # A vector: \langle 1,2\rangle -> (1,2)    <1,2> -> (1,2)
    r"\\langle ?|^<(?=[^<>]*,[^<>]*>$)": "(",
    r" ?\\rangle|(?<=,)([^<>,]*)>$": r"\1)",
    # √51 -> \sqrt{51}    √(n+1) -> \sqrt{n+1}
    r"√ ?(?:([0-9]+|[A-Za-z])|\(([^()]*)\))": r"\\sqrt{\1\2}",
    # A function in another font: \mathrm{cot}(x) -> \cot(x), where \mathrm is \text by now
    r"\\(?:text|operatorname) ?\{ ?(exp|ln|log|sin|cos|tan|cot|sec|csc) ?\}": r"\\\1",
    # <= -> \le    >= -> \ge    \leqslant -> \le
    r"(?:<=|\\leqslant(?![A-Za-z])) ?": r"\\le ",
    r"(?:>=|\\geqslant(?![A-Za-z])) ?": r"\\ge ",
    # \bigcup -> \cup    Rows of a matrix: \\[4pt] -> \\
    r"\\bigcup(?![A-Za-z])": r"\\cup ",
    r"\\\\\[[0-9.]+[a-z]{2}\]": r"\\\\",
    # 2pi -> 2\pi    sqrt(3) -> \sqrt(3)
    r"(?<![A-Za-z\\])(pi|sqrt)(?![A-Za-z])": r"\\\1",
    # exp(16) -> \exp(16)    cos(x) -> \cos(x)
    r"(?<![A-Za-z\\])(exp|ln|log|sin|cos|tan|cot|sec|csc)(?= ?\()": r"\\\1",
    # \varnothing -> \emptyset
    r"\\varnothing(?![A-Za-z])": r"\\emptyset",
    # Braces around the first argument: \frac12 -> \frac{1}2    \frac\pi2 -> \frac{\pi}2
    # \sqrt2 -> \sqrt{2}
    r"\\(frac|sqrt(?:\[[0-9]\])?) ?([0-9A-Za-z]|\\pi(?![A-Za-z])|\([^()]*\))": r"\\\1{\2}",
    # Braces around the second argument: \frac{1}2 -> \frac{1}{2}
    r"(\\frac ?\{[^{}]*\}) ?([0-9A-Za-z]|\\pi(?![A-Za-z]))": r"\1{\2}",
    # No braces around one character: x^{2} -> x^2    x_{1} -> x_1
    r"([\^_]) ?\{ ?([0-9A-Za-z]) ?\}": r"\1\2",
    # A space stays only between two of: digit, letter, comma. 2 \pi + 18 -> 2\pi+18, but 3 1/2 is
    # not 31/2, and 1, 234 is not 1234.
    r"(?<![0-9A-Za-z,]) +| +(?![0-9A-Za-z])": "",
    # 2{,}304 -> 2,304
    r"\{,\}": ",",
}
# 2,304    1,234,567, but not a part of 1,2,304
THOUSANDS = re.compile(r"(?<![0-9,.])[1-9][0-9]{0,2}(?:,[0-9]{3}){1,3}(?![0-9,])")
# The rest of the text after such a number. A bracket may close there only if it also opens there,
# as in 2,304(x+1). In (2,304) the comma may separate the members of a pair.
AFTER_THOUSANDS = re.compile(r"(?:[^()\[\]\\]|\\(?!\})|\([^()]*\))*")


def prepare(answer, label):
    """Gives both texts one spelling. Removes the name of a value, as the x of x = 5."""
    return drop_name(respell(answer), respell(label))


def respell(text):
    r"""Gives a text the spelling of CHARACTERS and REWRITES: $\dfrac12$. -> \frac{1}{2}"""
    # A dot or a space of LaTeX at the end: \(5\).    5\
    text = text.strip().rstrip(" .\\")
    text = text.replace("º", "°")
    # 10⁻³ -> 10^{-3}    4210₅ -> 4210_{5}    \frac{π²}{8} -> \frac{π^2}{8}
    for pattern, sign in RAISED.items():
        text = re.sub(pattern, rf"{sign}{{\g<0>}}", text)
    text = re.sub(r"([\^_])\{(.)\}", r"\1\2", text)
    # 3½ -> 3 ½
    text = re.sub("(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text)
    # NFKC gives digits of other widths their usual form, and writes ½ as 1⁄2.
    text = unicodedata.normalize("NFKC", INVISIBLE.sub("", text)).replace("⁄", "/")
    for character, latex in CHARACTERS.items():
        text = text.replace(character, latex)
    for pattern, replacement in REWRITES.items():
        text = re.sub(pattern, replacement, text)
    text = THOUSANDS.sub(drop_commas, text)
    # A semicolon separates, too: (1;2) -> (1, 2)
    text = text.replace(";", ", ")
    return text.strip().rstrip(" .,;:")


def drop_commas(match):
    r"""2,304\pi -> 2304\pi    2,304(x+1) -> 2304(x+1)    (2,304) stays"""
    rest = match.string[match.end() :]
    return match[0].replace(",", "") if AFTER_THOUSANDS.fullmatch(rest) else match[0]


# The sign between a name and its value: x = 5 and x \in S, but not <=    >=    !=    :=
EQUALS = re.compile(r"(?<![<>!:])=|\\in(?![A-Za-z])")
# The left side of an equation is no name if it has one of these: x \not= 5    \log x = 2
NO_NAME = r"(?:\bnot\b|\\(?:not|log|l[ng]|exp|sin|cos|tan|cot|sec|csc)(?![a-z]))"
# A name has braces only after \text, \overline, ^ and _: \text{Area}    \overline{AB}    f^{-1}
BRACES = r"(?:(?<=text)|(?<=line)|[\^_])\{[^{}]*\}"
# The name of a value, with its sign.
NAME = re.compile(
    # x =    \theta =    f(x) =    |AB| =    a:b =    (a, b) =    A_1 =
    rf"(?![^=]*{NO_NAME})\(?[A-Za-z\\|](?:[A-Za-z\\,'() |:+]|_\w|{BRACES})*(?:{EQUALS.pattern}) ?"
)


def drop_name(answer, label):
    """Removes the name from both texts: x = 5 -> 5. If both have a name, it must be the same."""
    matches = [NAME.match(answer), NAME.match(label)]
    names = {match[0] for match in matches if match}
    # Without a name, or with two names, both texts stay whole.
    if len(names) != 1:
        return answer, label
    # A label such as x+y = 17 asks for an equation, and not for the value of a name.
    if "+" in label.rpartition("=")[0]:
        return answer, label
    # In a list the name stands at the start and after each comma or space: x=1, x=2 -> 1, 2
    name = re.compile(rf"(?:^|(?<=[, ])){re.escape(names.pop())}")
    values = name.sub("", answer), name.sub("", label)
    # A text with several names keeps all of them: x=1, y=2
    if EQUALS.search(" ".join(values)):
        return answer, label
    return values


# ---- numbers -------------------------------------------------------------------------------------

# Digits without a sign: 42    4.2    .5    1,234    1 234    6.72e-5
DIGITS = (
    r"(?:(?:[1-9][0-9]{0,2}(?:[, ][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3})?"
)
# The form that `respell` gives to a fraction: \frac{3}{4}
FRACTION = re.compile(rf"\\frac\{{([+-]?{DIGITS})\}}\{{([+-]?{DIGITS})\}}")
NUMBER = re.compile(
    # The beginning of -5    £-5    -£5
    r"[£€¥₹]?(?P<sign>[+-]?) ?[£€¥₹]?"
    # The 3 of 3 1/2: digits and a space before a fraction
    r"(?:(?P<whole>[0-9]+) (?=[0-9.]+/))?"
    # 42    1/2    3:5
    rf"(?P<top>[+-]?{DIGITS})(?:[/:](?P<bottom>[+-]?{DIGITS}))?"
    # The end of 50%
    "(?P<percent>%?)"
)
# A number that `respell` does not change: 42    -4.2
PLAIN = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
# 3\times10^8 -> 3e8    1.2*10^{-5} -> 1.2e-5
TIMES_TEN = re.compile(
    rf"(?<![/:.,0-9])({WHOLE})"
    r"(?:\\times ?|\\cdot ?|\*| ?x ?)10\^(?:([0-9])|\{(-?[0-9]{1,3})\})$"
)
# 0.1\overline{6}    0.\bar{3}    0.(3)
REPEATING = re.compile(
    r"^(-?)([0-9]*)\.([0-9]{0,9})(?:\\(?:overline|bar|dot)\{|\()([0-9]{1,9})[})]$"
)
# Brackets around a number: (1/2) -> 1/2    -(5) -> -5    \{5\} -> 5    (7)/(2) -> 7/2
# 1/(2%) stays, because it is not 1/2%.
BRACKETS = re.compile(r"(?:^|(?<=[-+])|(?<=/)(?!.*%))(?:\(|\\\{)([^(){},]*)(?:\)|\\\})(?=[/%]|$)")
# A power or root of numbers. It may stand in brackets.
POWER_OR_ROOT = re.compile(
    # 2^10    10^{-3}    3\times10^5
    r"[+-]?\(?(?:(?:[0-9.]+(?:\\times|\\cdot|\*) ?)?[0-9.]+\^(?:[0-9]|\{-?[0-9]+\})"
    # \sqrt{16}    \sqrt[3]{8}
    r"|\\sqrt(?:\[[0-9]\])?\{[0-9.]+\})\)?"
)

# ---- units ---------------------------------------------------------------------------------------

# What may follow a number. The lists are closed, because other words may change the number:
# 4 tens    3 halved    2 pairs    5 below zero

PREFIXES = ("", "kilo", "centi", "milli", "deci", "micro", "nano", "mega", "giga")
PREFIXED = "meter metre gram liter litre watt joule byte bit second hertz volt newton pascal"
# Measures of length, area, volume, mass, time, speed, angle, temperature, money, energy and data.
MEASURES = """
mm cm dm km nm in inch foot feet ft yard yd mile mi acre hectare ml cl dl gallon gal quart pint cup
tablespoon teaspoon tbsp tsp mg kg kilo pound lb ounce oz ton tonne
sec minute min hour hr day week month year yr decade century mph kph knot degree deg radian rad
celsius fahrenheit kelvin
dollar usd cent penny pennies pence dime nickel euro eur gbp yen rupee peso calorie kwh kw kj hz mol
mole kb mb gb tb amp ohm ev unit way st nd rd th
"""
# Behind a number these may also be variables: 5m. So they are units only in \text{m} and m/s.
LETTERS = set("mgshlLJCFKNVWA")
# What problems count. The words were chosen from the problems of GSM8K and MATH.
COUNTED = """
adult alligator animal answer ant apartment apple arm arrangement article bag ball balloon banana
barrel basket basketball bead bean bear bed bee berry bicycle bike bird block blueberry boat bone
book bottle bowl box boy bracelet branch brick brother brownie bucket building burger bus bush
bushel button cake call camper can candle candy cap car card carrot carton case cat chair chapter
character chef chicken child children chip chocolate choice circle class classroom clip coin color
column combination computer container cookie copy country cow crab cracker crate crayon cube cupcake
customer daisy decoration desk diagonal diamond digit dish divisor dog doll donut door dress drink
duck earring edge egg element elephant email employee envelope episode eraser error event eye face
factor family feather file finger fish flight floor flour flower flyer follower friend frog fruit
function game geese gift girl glass goal goat goose grape graph guest hamburger hand hat head hen
horse house insect integer item jar jellybean journey juice jump kernel key kid kind kitten lamp lap
laptop leaf leaves leg lemon lesson letter line loaf loaves log lollipop magazine man mango marble
mark marker marshmallow match meal member men message mice milk mouse movie muffin mushroom nail
necklace night note notebook number nut object onion orange outcome outfit oyster pack package
packet page paint painting pancake panda pant paper parent part passenger path patient peach pear
pen pencil penguin people pepper period person pet phone photo picture pie piece pig pigeon pill
pirate pizza place plant plate player plum point position pot potato present prime prize problem pup
puppy puzzle question rabbit record ribbon rice ring rock roll room rose round row sandwich scoop
seashell season seat section seed segment sentence serving session sheep sheet shelf shell shelves
shirt shoe side sister slice snack snake sock soldier solution song spider spoon spot stamp star
step stick sticker stitch stone story strawberry string student subject subset sugar suitcase
sweater sweet table tail tank task teacher team teeth tent text throw ticket tile tire token tomato
tooth towel toy train tree triangle trip truck tube tulip turkey turtle type value vase vegetable
vehicle vertex vertices video visitor vote walnut water watermelon wheel widget window wing wolf
wolves woman women word worker worm zebra zero
"""
UNITS = {prefix + name for prefix in PREFIXES for name in PREFIXED.split()}
UNITS |= {*MEASURES.split(), *COUNTED.split(), *"€£¢¥₹", "total", "left", "remaining"}
# 12 sq. units    60 miles per hour    10 different ways    3 cups of apples
BETWEEN_UNITS = ["square", "sq", "cubic", "cu", "per", "of", "a", "an", "different", "distinct"]
BETWEEN_UNITS += ["possible", "positive", "real", "old", "long", "away"]
# The end of a text that may be a unit. A unit has 60 characters or fewer.
UNIT = re.compile(
    # 5\text{ cm}    10\text{ ft}^3/\text{min}
    r"(?<=[0-9A-Za-z})% ]) ?(?:\\text\{(?P<first>[^{}]{1,60})\}(?:\^[23])?"
    r"(?:/\\text\{(?P<second>[^{}]{1,60})\})?"
    # 5 cm    60 miles/hour    10 ft^3/min
    r"|(?<![A-Za-z])(?P<bare>[A-Za-z][A-Za-z ./]{0,60}(?:\^[23]/[A-Za-z]{1,20})?)"
    # 20€    12^{\text{th}}
    r"|[€£¢¥₹]|\^\{\\text\{(?:st|nd|rd|th)\}\})"
    # 15 cm^2
    r"(?:\^[23])? ?$"
)


def drop_unit(text):
    """Removes a unit at the end, because a label often lacks it: 5 cm -> 5    3 apples -> 3"""
    match = UNIT.search(text, max(0, len(text) - 140))
    if not match:
        return text
    phrases = [match[name] for name in ("first", "second", "bare") if match[name]]
    are_units = all(is_unit(phrase, phrase == match["bare"]) for phrase in phrases)
    return text[: match.start()] if are_units else text


def is_unit(phrase, is_bare):
    """cm    square units    miles/hour    (cubic) feet    but not: million    apples and pears"""
    words = re.split(r"[ /.()^23-]+", phrase.strip(" /.()^23-"))
    letters = set() if is_bare and "/" not in phrase else LETTERS
    has_unit = False
    for word in words:
        lower = word.lower()
        # miles    inches    candies
        forms = {lower, lower.removesuffix("s"), lower.removesuffix("es")}
        if lower.endswith("ies"):
            forms.add(lower[:-3] + "y")
        if word in letters or forms & UNITS:
            has_unit = True
        elif lower not in BETWEEN_UNITS:
            return False
    return has_unit


def parse_number(text):
    """The exact value of an integer, decimal, fraction or mixed number, or None.

    Returns two values: one ignores a percent sign, one applies it. 50% -> (50, 1/2)    5 -> (5, 5)
    """
    # Python refuses to read very long numbers.
    if len(text) > MAX_TEXT:
        return None
    text = TIMES_TEN.sub(r"\1e\2\3", drop_unit(text))
    text = REPEATING.sub(read_repeating, text)
    # 3\frac{1}{2} -> 3 1/2
    text = FRACTION.sub(r" \1/\2", text)
    number = NUMBER.fullmatch(BRACKETS.sub(r"\1", text.strip()).strip())
    if not number:
        return None
    bottom = parse_digits(number["bottom"] or "1")
    if bottom == 0:
        return None
    value = parse_digits(number["whole"] or "0") + parse_digits(number["top"]) / bottom
    if number["sign"] == "-":
        value = -value
    if number["percent"]:
        return value, value / 100
    return value, value


def read_repeating(match):
    r"""0.1\overline{6} -> 15/90"""
    sign, whole, before, period = match.groups()
    # 0.1666... = (16 - 1) / 90
    top = int(whole + before + period) - int((whole + before) or "0")
    return f"{sign}{top}/{'9' * len(period)}{'0' * len(before)}"


def clock_of(text):
    """(hours, minutes) of a text that may be a time of day, such as 8:34, or None."""
    clock = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text)
    return (int(clock[1]), int(clock[2])) if clock else None


def parse_digits(text):
    """1,234.5 -> Fraction(2469, 2)"""
    return Fraction(re.sub("[, ]", "", text))


# ---- quick rules: each returns True, False, or None where it cannot tell -------------------------


def quick_verdict(answer, label):
    """The verdict of the first rule that can tell, in linear time. None: only algebra can tell."""
    if answer.strip() == label.strip():
        return label.strip() != ""
    if max(len(answer), len(label)) > MAX_TEXT:
        return False
    # Most answers and labels are plain numbers. The rules below would take 30 times as long.
    if PLAIN.fullmatch(answer) and PLAIN.fullmatch(label):
        return Fraction(answer) == Fraction(label)
    answer, label = prepare(answer, label)
    # A character of Unicode may have become several.
    if max(len(answer), len(label)) > MAX_TEXT:
        return False
    verdict = same_number(answer, label)
    if verdict is not None:
        return verdict
    # same_number finds units by their \text{}. The rules below read the words in it.
    answer = unwrap_text(answer)
    label = unwrap_text(label)
    # The last two rules only refuse.
    for rule in (same_text, same_choice, same_in_base, same_word, same_shape, misread_by_algebra):
        verdict = rule(answer, label)
        if verdict is not None:
            return verdict
    return None


def same_number(answer, label):
    """Numbers are compared exactly. Both 0.5 and 50 equal 50%, because labels often lack the sign.

    If the label is a number, the answer must be one. 3+4 does not equal 7, because it may be a copy
    from the question. A power or a root of numbers is allowed.
    """
    number = parse_number(answer)
    label_number = parse_number(label)
    if not label_number:
        return None
    # Only algebra can compute a power or a root.
    if not number and POWER_OR_ROOT.fullmatch(drop_unit(answer)):
        return None
    if not number:
        return False
    times = [clock_of(text) for text in (answer, label)]
    if None not in times:
        return times[0] == times[1]
    # A time, such as 10:30 or 3:07, equals no number without a colon. 3:10 may be a reduced ratio.
    one_colon = (":" in answer) != (":" in label)
    are_times = ":0" in answer + label or any(x and math.gcd(*x) > 1 for x in times)
    if one_colon and any(times) and are_times:
        return False
    # Equal without the percent signs, or equal with them.
    return number[0] == label_number[0] or number[1] == label_number[1]


def unwrap_text(text):
    r"""\text{red}, \text{blue} -> red,blue"""
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text).replace(", ", ",").strip()


def same_text(answer, label):
    """Two texts with the same characters are equal. Nothing equals an empty text."""
    if not answer or not label:
        return False
    if answer == label:
        return True
    return None


def same_choice(answer, label):
    """If the label is a letter from A to J, it names one of several choices. The answer may add the
    text of the choice: `C. 12 m` for `C`."""
    # C    (C)
    choice = re.fullmatch(r"\(?([A-J])\)?", label)
    # C    (c)    C. 12 m    Option C    choice (C)    but not the product (a)(b)
    given = re.match(
        r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer) ?)?\(?([A-Ja-j])(?:[.:)](?!\()|$)", answer
    )
    if not choice or not given:
        return None
    # Several choices: (B), (A)    A. B. C. D.    A. 12; C. 14
    others = set(re.findall(r"[ ,.:)]\(?([A-J])[.):]", answer)) - {choice[1]}
    return choice[1] == given[1].upper() and not others


# 52_8    (52)_8    1A3_{16}
IN_BASE = re.compile(r"(?i)\(?(?P<digits>[0-9][0-9A-F]*)\)?_\{?(?P<base>[0-9]+)\}?")


def same_in_base(answer, label):
    """If the label names a base, the answer must name it, too: 52 does not equal 52_8."""
    numeral = IN_BASE.fullmatch(label)
    if not numeral:
        return None
    given = IN_BASE.fullmatch(answer)
    return bool(given) and given[1].upper() == numeral[1].upper() and given[2] == numeral[2]


def same_word(answer, label):
    """Words are compared without case. A label in capitals, such as ABCD, names points of a figure:
    abcd does not equal it. A word has four letters or more, because xy is a product."""
    # even    Monday    yes    8:34pm
    word = re.fullmatch(r"[A-Za-z' ]{4,}|[Yy]es|[Nn]o|[0-9:]+[AaPp]m", label)
    given = re.fullmatch(r"[0-9:A-Za-z' -]+", answer)
    if not word or not given:
        return None
    return not label.isupper() and answer.casefold() == label.casefold()


# <    >    \le    \leq    \ge    \geq
RELATION = r"(?:[<>]|\\[lg]eq?(?![A-Za-z]) ?)"


def same_shape(answer, label):
    r"""A list must have as many members as the label. If the label is a pair, brackets are needed.

    This rule can only refuse. It does not decide about inequalities, \mathbb{R} and matrices, which
    may equal texts of other shapes.
    """
    if re.search(rf"{RELATION}|\\(?:neq?|mathbb|setminus|begin)(?![a-z])", answer + label):
        return None
    if count_members(answer) != count_members(label):
        return False
    # The label (1,2) refuses the answer 1,2: before its comma there is no opening bracket.
    if re.fullmatch(r"\(.*,.*\)", label) and not re.match(r"[^(\[]*[(\[].*,", answer):
        return False
    return None


def count_members(text):
    r"""1,2,3 -> 3    1\pm2 -> 2"""
    return 1 + text.count(",") + text.count(r"\pm")


# An inequality is solved if a letter, or its negative, stands alone on one side of a relation.
# x > 5    -x < -5    0 < x_1 < 5    but not \frac{1}{x-5} > 0
SOLVED = re.compile(rf"(?:.*{RELATION})?[+-]?\\?[A-Za-z]+(?:_[0-9])?(?:$|,|{RELATION})")


def is_unsolved(text):
    """Is the text an inequality that is not solved?"""
    return bool(re.search(RELATION, text)) and not SOLVED.match(text)


def misread_by_algebra(answer, label):
    """The last rule: False where math-verify would be wrong."""
    # An equation is not a value.
    if bool(EQUALS.search(answer)) != bool(EQUALS.search(label)):
        return False
    # An inequality that is not solved may be a copy from the question.
    if is_unsolved(answer) and not is_unsolved(label):
        return False
    # The grammar of math-verify drops primes: f'(x)
    if answer.count("'") != label.count("'"):
        return False
    # It also drops bases (52_8), and takes the letters of \angle ABC for a product.
    if re.search(r"[0-9]_|\\(?:tri)?angle", answer + label):
        return False
    return None


# ---- the process for algebra --------------------------------------------------------------------


class Worker:
    """The parent's side of a worker process, which starts at the first question.

        worker = Worker(cpu_seconds=5.0, wall_seconds=120.0)
        worker.ask("2x", "x+x")  # "equal"
        worker.close()

    If the process has ended, the next question starts another one. One thread may call `close`
    while another thread is in `ask`.
    """

    def __init__(self, cpu_seconds, wall_seconds):
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_seconds
        self.process = None
        self.is_closed = False

    def ask(self, answer, label):
        """The verdict, "equal" or "different", or why there is none.

        There is none after "cpu_timeouts", "wall_timeouts" or "crashes". Then the process has
        ended. Raises OSError if no process can be started.
        """
        verdict = ""
        # The process may end before it has read the question: BrokenPipeError. `close`, in another
        # thread, may have closed the pipes: ValueError.
        with contextlib.suppress(BrokenPipeError, ValueError):
            if self.process is None or self.process.poll() is not None:
                self.start()
            # JSON writes half of a surrogate pair, which UTF-8 cannot hold, in ASCII.
            self.process.stdin.write(json.dumps([answer, label]).encode() + b"\n")
            if not wait([self.process.stdout], self.wall_seconds):
                self.end()
                return "wall_timeouts"
            verdict = self.process.stdout.readline().decode().strip()
        if verdict:
            return verdict
        # The process has ended by itself. `end` closes its pipes and reads its exit code.
        self.end()
        if self.process.returncode == -signal.SIGPROF:
            return "cpu_timeouts"
        return "crashes"

    def start(self):
        """Starts the process, and waits until it has made its imports, which take 2 s."""
        # With -P Python does not look into the current folder, which may have another `nanoorz`.
        command = [sys.executable, "-P", "-m", "nanoorz.algebra", str(self.cpu_seconds)]
        # An empty path would also mean the current folder.
        paths = [ROOT, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        # The order of terms in sympy depends on the hashes of texts. Without a seed these differ
        # from process to process.
        environment["PYTHONHASHSEED"] = "0"
        self.process = Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, env=environment)
        # `close` may have run before this process was there. Then no question will come.
        if self.is_closed:
            self.end()
        if self.process.stdout.readline() != b"ready\n":
            raise ChildProcessError(f"{' '.join(command)} ended before its first check")

    def end(self):
        # The end of the `with` closes the pipes and waits for the end of the process.
        with self.process:
            self.process.kill()

    def close(self):
        """Ends the process. No later call of `ask` leaves a process behind."""
        self.is_closed = True
        if self.process is not None:
            self.end()
