r"""Is an answer equal to its label? This file has quick rules. algebra.py decides the rest.

    quick_verdict("x = 1,234 red marbles", "1234")  # True
    quick_verdict("1,234 dozen", "1234")            # False
    quick_verdict("2x", "x+x")                      # None: only algebra can tell

`prepare` gives both texts one spelling and removes the name x of x = 5. Then numbers are compared
exactly, without the words behind them. After that come rules for other texts.

Where to add what: one token in SPELLINGS, and more than one in REWRITES; a unit in UNITS, and one
letter in UNIT_LETTERS; a word that changes a number in CHANGES; a form of numbers in FORMS; a
refusal in `refuse_misread`, but in `same_number` if the label is a number.

tests/test_equal.py tests the examples in the comments. An arrow means that the answer before it is
right for the label behind it, and != that it is wrong.
"""

import re
import unicodedata
from fractions import Fraction

# A longer text equals only the same text, also if NFKC makes it longer.
MAX_TEXT = 2_500

# ---- spelling: what can be written in many ways gets one spelling --------------------------------

# A token: a command of LaTeX, the \\ of a matrix, a word, or one character. A command may have two
# backslashes: \\sqrt{5} -> \sqrt5
TOKEN = re.compile(
    r"\\(?:left|right)\.|\\[A-Za-z]+|\\\\(?![A-Za-z])|\\[^A-Za-z\\]|[A-Za-z]+|<=|>=|.", re.DOTALL
)
# {the spelling: each TOKEN that gets it}. A space at the end keeps a command apart from a letter.
SPELLINGS = {
    # Sizes of brackets, layout, currencies: \$\left(\bf 42\right) -> 42    -$5 -> -5    20€ -> £20
    "": r"""\left \right \left. \right. \bigl \bigr \Bigl \Bigr \biggl \biggr \Biggl \Biggr
        \displaystyle \large \Large \bf \boldsymbol \bm \pmb \mathbf \mathit \mathsf \underline
        \boxed $ \$ \textdollar € £ ¢ ¥ ₹""",
    # Spaces: 3\quad\frac12 -> 7/2    1~234 -> 1234
    " ": r"\, \; \: \quad \qquad ~",
    # Fonts of text: 5\mathrm{cm} -> 5    \textbf{east} -> \mbox{East}
    "\\text": r"\mathrm \mbox \textbf \textit \textrm \textsf \texttt \textnormal \emph",
    # Other names and characters: \dfrac12 -> \tfrac{1}{2}    2pi -> 2π    x≤5 -> x \leqslant 5
    "\\frac": r"\dfrac \tfrac \cfrac",
    "\\pi ": "π pi Pi PI",
    "\\sqrt": "sqrt Sqrt",
    "\\infty ": "∞",
    "\\emptyset ": r"\varnothing ∅",
    "\\cup ": r"\bigcup ∪",
    "\\in ": "∈",
    "\\pm ": "±",
    "\\approx ": "≈",
    "\\le ": r"\leq \leqslant <= ≤",
    "\\ge ": r"\geq \geqslant >= ≥",
    "\\ne ": r"\neq ≠",
    "\\cdot ": "⋅ ·",
    "\\times ": "×",
    "^\\circ ": r"\degree °",
    "%": r"\% percent Percent pct",
    "-": "− – ‐",
    "/": "÷",
    ":": "∶",
    # Brackets of vectors: \langle 1,2\rangle -> (1,2)    ⟨2,1⟩ != (1,2)
    "(": r"\langle ⟨",
    ")": r"\rangle ⟩",
    # What separates the members of a list: 1, 2, and 3 -> 3; 2; 1    1 or 2 != 12
    ";": "and or",
}
SPELLING_OF = {token: form for form, tokens in SPELLINGS.items() for token in tokens.split()}
SPELLING_OF["\\ "] = " "

# In \text and beside a slash these letters are units, and else variables: 5\mathrm{m} -> 5
UNIT_LETTERS = "mgshlLJCFKNVWA"
LARGE = {"thousand": "e3", "million": "e6", "billion": "e9", "trillion": "e12"}
FUNCTIONS = "exp|ln|log|lg|sin|cos|tan|cot|sec|csc"


def write_large(match):
    number, text, word = match.groups()
    return number + LARGE[word.lower()] + (text or "")


def drop_commas(match):
    """In brackets a comma may separate the members of a pair: (2,304) != 2304"""
    before = match.string[: match.start()]
    opened = sum(before.count(bracket) for bracket in ("(", "[", "\\{"))
    closed = sum(before.count(bracket) for bracket in (")", "]", "\\}"))
    return match[0] if opened > closed else match[0].replace(",", "")


# {pattern: replacement}, in the order of use. After the first three, spaces are single, and none
# stands before a brace or behind {.
REWRITES = {
    # A negative space, and colors: 10,\! 080 -> 10080    \textcolor{red}{42} -> 42
    r"\\!\s*|\\(?:text)?color ?\{[a-z]+\}": "",
    # \frac {1} {2} -> \frac{1}{2}
    r"\s+": " ",
    r" (?=[{}])|(?<=\{) ": "",
    # Markdown around a part, or what is left of it: **73** -> 73    73** -> 73    2**3**2 != 64
    r"(?<![\w)*])(\*{1,3}|__|`{1,3})(?=[^\s*`])([^*`\n]{1,99}?)(?<![\s*`_])\1(?![\w(*])": r"\2",
    r"^\*\*|\*\*$": "",
    # \approx{8.24} -> 8.24    USD 5 -> 5
    r"^ ?(?:\\approx|\\text\{USD\}|USD\b) ?": "",
    # A formula that is the whole text: \[5\] -> 5    \( x+1 \) -> x+1
    r"^ ?\\[\[(]((?:(?!\\[()\[\]]).)*)\\[\])] ?$": r"\1",
    # 1.5 x 10^3 -> 1500
    r"(?<=[0-9]) ?x ?(?=10\^)": r"\\times ",
    # Powers: x**12 -> x^{12}    10^(-5) -> 10^{-5}
    r"(?<=[\w)}])\*\*(-?[0-9]+|[A-Za-z]|\([^()]*\))|\^ ?\(([^()]*)\)": r"^{\1\2}",
    # Bases: 5_{10} -> 5    40 (base 9) -> 40_9    40\text{ in base }9 -> 40_9    5_8 != 5
    r"(?<=[0-9])_(?:10|\{10\})(?=\W*$)": "",
    r"(?<=[0-9A-Fa-f)]) ?(?:\\text\{)? ?\(?(?:in )?base[ }]*([0-9]{1,2})[)}]*$": r"_{\1}",
    # Large numbers: 5 Million -> 5000000    5\text{ billion dollars} -> 5e9    1/2 million != 1/2
    r"(?i)(?<![/:.,0-9])([0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?) ?(\\text\{)?"
    rf"({'|'.join(LARGE)})\b": write_large,
    # Percent: 50 per cent -> 50\text{ percent}    50 pct -> 0.5
    r" ?\\text\{(?:%|per cent)\}| ?(?:%|\bper cent\b)": "%",
    # Text without a word, and a word that joins a list: 1,2\text{, and }3 -> 3,2,1    1 or 2 != 12
    r"\\text\{\}": "",
    r",? ?(?:\\text\{[ ,;]*\}|;)[ ,;]*": ", ",
    # One letter in \text that is no unit: \mathrm{x} -> x
    rf"\\text\{{(?![{UNIT_LETTERS}])([A-Za-z])\}}": r"\1",
    # Braces around the whole, or around a number: {42} -> 42    {48} eggs -> 48
    # \text{72 clips} -> 72
    r"^(?:\\text\{(?=-?\.?[0-9])|\{)((?:[^{}]|\{[^{}]*\})*)\}$": r"\1",
    r"^\{(-?[0-9.,]+)\}": r"\1",
    # Times of day: 8:34 PM -> 8:34 \text{ p.m.}    8:34 a.m. != 8:34 p.m.
    r"(?<=[0-9]) ?(?:\\text\{)?([AaPp])\.? ?[Mm](?![A-Za-z])\.? ?\}?$": r"\1m",
    # Degrees: 90^{\circ} -> 90    30^\circ C -> 30    \frac{90^\circ}{2} -> 45
    r"\^ ?(?:\{\^?\\circ ?\}|\^?\\circ(?![A-Za-z]))(?:\{\})?(?: ?[CF]$)?": "",
    # A ratio: 3 to 2 -> 3/2    2\text{ to }3 != 3:2
    r"^([0-9.]+)(?:\\text\{to\} ?| ?to )([0-9.]+)$": r"\1/\2",
    # A vector: <1, 2> -> (1,2)    <2, 1> != (1,2)
    r"^<(?=[^<>,]*,)([^<>]*)>$": r"(\1)",
    # A root: √51 -> \sqrt{51}    √(n+1) -> \sqrt{n+1}
    r"√ ?(?:([0-9]+|[A-Za-z])|\(([^()]*)\))": r"\\sqrt{\1\2}",
    # A function: \mathrm{cot}(x) -> \cot x    exp(16) -> \exp(16)
    rf"\\(?:text|operatorname)\{{({FUNCTIONS})\}}|(?<![A-Za-z\\])({FUNCTIONS})(?= ?\()": r"\\\1\2",
    # The distance between the rows of a matrix, such as [4pt]
    r"\\\\\[[0-9.]+[a-z]{2}\]": r"\\\\",
    # Braces around each argument: \frac12 -> \frac{1}{2}    \frac\pi2 -> \frac{\pi}{2}
    r"\\(frac|sqrt(?:\[[0-9]\])?) ?([0-9A-Za-z]|\\pi(?![A-Za-z])|\([^()]*\))": r"\\\1{\2}",
    r"(\\frac\{[^{}]*\}) ?([0-9A-Za-z]|\\pi(?![A-Za-z]))": r"\1{\2}",
    # No braces around one character: x^{2} -> x^2    x_{1} -> x_1
    r"([\^_]) ?\{([0-9A-Za-z])\}": r"\1\2",
    # A space stays only if a digit, letter or comma stands before it, and a digit or letter behind
    # it. It also stays between a bracket and a word, and between % and a word: 3 1/2 != 31/2
    # 1, 234 != 1234    \frac12 pizza -> 1/2    5% per year -> 5%
    r"(?<![0-9A-Za-z,})%]) | (?![0-9A-Za-z])|(?<=[})%]) (?![A-Za-z]{2})": "",
    # Commas of thousands: 2{,}304 -> 2304    1,234(x+1) -> 1234x+1234    1,234,56 != 123456
    r"\{,\}": ",",
    r"(?<![0-9,.])[1-9][0-9]{0,2}(?:,[0-9]{3}){1,3}(?![0-9]|,[0-9])": drop_commas,
}


def respell(text):
    r"""Gives a text the spelling of SPELLINGS and REWRITES: $\dfrac12$. -> \frac{1}{2}"""
    if len(text) > MAX_TEXT or len(unicodedata.normalize("NFKC", text)) > MAX_TEXT:
        return ""
    # Characters that nobody sees, such as marks of the writing direction, have the category Cf.
    text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    # A dot or a space of LaTeX at the end: \(5\). -> 5
    text = text.strip().rstrip(" .\\")
    # NFKC below would make an o of º:    90º -> 90
    text = text.replace("º", "°")
    # Raised and lowered characters: 10⁻³ -> 0.001    4210₅ -> 4210_5    2ˣ != 2x
    text = re.sub("[¹²³ʰ-ʸˠ-ˤᴬ-ᵡᶛ-ᶿ⁰-ⁿ]+", r"^{\g<0>}", text)
    text = re.sub("[ᵢ-ᵪ₀-ₜ]+", r"_{\g<0>}", text)
    # 3½ -> 3.5    3½ != 31/2
    text = re.sub("(?<=[0-9])(?=[¼-¾⅐-⅞])", " ", text)
    # NFKC gives digits of other widths their usual form, and writes ½ as 1⁄2.
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/")
    text = TOKEN.sub(lambda token: SPELLING_OF.get(token[0], token[0]), text)
    for pattern, replacement in REWRITES.items():
        text = re.sub(pattern, replacement, text)
    return text.strip().rstrip(" .,;:")


# ---- names: the x of x = 5 -----------------------------------------------------------------------

# The sign between a name and its value: = but not <= >= != :=, or \in
EQUALS = re.compile(r"(?<![<>!:])=|\\in(?![A-Za-z])")
NAME = re.compile(
    # A left side with one of these is no name: x \not= 5 != 5    \log x = 2 != 2
    rf"(?![^=]*(?:\bnot\b|\\(?:{FUNCTIONS})(?![a-z])))"
    # f(x) = 5 -> 5    f(3) = 5 -> 5    |AB| = 5 -> 5    (a, b) = (1,2) -> (1,2)    A_1 = 5 -> 5
    r"\(?[A-Za-z\\|](?:[A-Za-z\\,'() |:+]|_\w|\([0-9]\)"
    # \text{Area} = 5 -> 5    \overline{AB} = 5 -> 5    f^{-1}(x) = 2x -> 2x    a_{10} = 5 -> 5
    r"|(?:(?<=text)|(?<=line)|[\^_])\{[^{}]*\})*"
    rf"(?:{EQUALS.pattern}) ?"
)


def prepare(answer, label):
    """Gives both texts one spelling, and removes the name of a value from both."""
    answer, label = respell(answer), respell(label)
    names = {match[0] for match in (NAME.match(answer), NAME.match(label)) if match}
    # Two names stay, and the label may be an equation:    x = 5 != y = 5    17 != x+y = 17
    if len(names) != 1 or "+" in label.rpartition("=")[0]:
        return answer, label
    # In a list the name stands at the start and after each comma: x=1, x=2 -> 1, 2
    name = re.escape(names.pop())
    values = [re.sub(rf"(?:^|(?<=[, ])){name}", "", text) for text in (answer, label)]
    # A text with several names keeps all of them: x=2, y=1 != x=1, y=2
    return (answer, label) if EQUALS.search(" ".join(values)) else tuple(values)


# ---- behind a number -----------------------------------------------------------------------------

# Words behind a number are dropped if one is in UNITS or a plural with s, and none is in CHANGES.
# UNITS also has nouns in the singular, and roots, powers and so on, because CHANGES has root.
UNITS = """
mm cm dm km nm in inch foot feet ft yard yd mile mi meter metre millimeter centimeter kilometer acre
ml cl dl liter litre gallon gal quart pint cup teaspoon tablespoon tbsp tsp mg kg gram kilogram
pound lb ounce oz ton sec second min minute hour hr day week month year yr decade mph kph knot
degree deg radian rad celsius fahrenheit kelvin dollar usd cent penny pence euro eur gbp yen rupee
calorie kwh kw kj joule newton watt volt ohm hertz hz mol mole kb mb gb tb ev unit way path length
people men women children teeth geese mice fish sheep deer solution integer triangle circle person
child student boy girl apple pizza cake pie cookie egg ball marble book box card ticket hectare
milligram milliliter piece slice bag bottle page game lap cat dog banana orange coin century tonne
amp inches
total left remaining altogether per st nd rd th roots powers bases logs zeros zeroes
"""
# These words and their plurals change or deny the number: 5 hundred != 5    5 factorials != 5
# 5 squared != 5    5 times the radius != 5    5 theta degrees != 5    5 less than all sums != 5
# 5 degrees below zero != 5    5 km north != 5 km south
CHANGES = """
zero one two three four five six sixes seven eight nine ten eleven twelve thirteen fourteen fifteen
sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred
thousand million billion trillion quadrillion quintillion lakh lac crore dozen doz score gross half
halve third quarter mil thou percent percentage factorial infinity undefined unknown false dne
squared cubed halved doubled tripled twice quadruple times plus minus over divided multiplied choose
mod modulo base root power repeating sin cos tan cot sine cosine log exp alpha beta gamma delta
epsilon theta lambda rho sigma tau phi omega radical imaginary radius less fewer than least most not
never doesn't isn't cannot violate exceed fail are unless when for but except without out below
above under subzero before after ago late earlier younger shorter down downward downwards back
backward backwards behind ahead lower lighter slower cheaper colder cooler smaller downhill
downstairs short slow past decrease loss lost owed debt deficit negatives right clockwise
anticlockwise counterclockwise north south east west northeast northwest southeast southwest
"""
# 5\text{ cm} -> 5    10\text{ ft}^3/\text{min} -> 10    60 miles/hour -> 60    15 cm^2 -> 15
IN_TEXT = r"\\text\{[^{}\\]{1,60}\}(?:\^[23])?"
BARE = r"(?<![A-Za-z\\])[A-Za-z][A-Za-z .'()-]{0,60}(?:\^[23])?"
# 12^{\text{th}} -> 12    12\text{th} -> 12    12th day -> 12    5th root != 5
TAIL = re.compile(
    r"\^\{\\text\{(?:st|nd|rd|th)\}\}$"
    rf"|(?<=[0-9A-Za-z}})% ])(?P<words> ?{IN_TEXT}(?:/?{IN_TEXT}|/{BARE}){{0,2}}"
    rf"| ?{BARE}(?:/{BARE}|/{IN_TEXT}){{0,2}}) ?$"
)


def drop_tail(text):
    """Removes the words behind a number, because a label often lacks them."""
    # The pattern matches at most 211 characters, also in a long text.
    match = TAIL.search(text, max(0, len(text) - 220))
    if match and (match["words"] is None or is_unit(match["words"], text[: match.start()])):
        return text[: match.start()]
    return text


def is_unit(tail, number):
    """Is one of the words a unit or a plural, and does none change the number?"""
    letters = list(UNIT_LETTERS) if "\\text" in tail or "/" in tail else []
    words = re.findall("[^ /.(){}]+", re.sub(r"\\text|\^[23]", " ", tail))
    # A word for several things may come first, or behind another word: 5 pairs != 5
    # 5 ordered pairs -> 5
    if not words or is_listed(words[0], "pair couple trio triple double fold grand"):
        return False
    if any(may_change(word) for word in words if word not in letters):
        return False
    units = [word in letters or is_listed(word, UNITS) for word in words]
    # Without a space, letters may be variables: 5cm -> 5    5apples -> 5    24abcds != 24
    if tail[0] not in " \\":
        return units[0]
    # One thing needs no plural: 1 red car -> 1    5 car != 5    1 negative != 1
    if number in ("1", "-1") and words[-1] != "negative":
        return True
    # 5 red marbles -> 5    5 abs != 5    \frac{1}{2} at^2 != \frac{1}{2}
    return any(units) or any(len(word) > 3 and word[-1] in "sS" for word in words)


def may_change(word):
    """Is the word in CHANGES, an ordinal, or too short to be surely a word?"""
    harmless = ("a", "an", "at", "in", "of", "on", "sq", "cu", "with", "both")
    if is_listed(word, UNITS) or word in harmless:
        return False
    # 5m != 5    5 ab cm != 5    5 xyz units != 5
    if len(word) < 3 or not re.search("[aeiouAEIOU]", word):
        return True
    # 5 two-digit numbers -> 5    5 sixteenths != 5    5 sixty-fourths != 5    5 eighth-inches != 5
    parts = word.removesuffix("'s").split("-")
    if word[-1] not in "sS":
        parts = parts[-1:]
    return any(is_listed(x, CHANGES) or x.lower().endswith(("th", "ths")) for x in parts)


def is_listed(word, words):
    """Has the list the word or its singular?"""
    word = word.lower()
    readings = (word, word.removesuffix("s"), re.sub("ies$", "y", word))
    return any(reading in words.split() for reading in readings)


# ---- numbers -------------------------------------------------------------------------------------


def decimal(text):
    return Fraction(re.sub("[, ]", "", text))


def ratio(whole, top, bottom):
    bottom = decimal(bottom)
    return int(whole or 0) + decimal(top) / bottom if bottom else None


def scientific(factor, power):
    return decimal(factor) * Fraction(10) ** int(power.strip("{}"))


def repeating(whole, before, period):
    # 0.1666... = (16 - 1) / 90
    top = int(whole + before + period) - int(whole + before or "0")
    return Fraction(top, int("9" * len(period) + "0" * len(before)))


# 42    4.2    .5    1,234    1 234    6.72e-5
DECIMAL = (
    r"([+-]?(?:(?:[1-9][0-9]{0,2}(?:[, ][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)"
    r"(?:[eE][+-]?[0-9]{1,3})?)"
)
# {form, without its signs: function from its groups to the value or None}. DECIMAL has a group.
FORMS = {
    # 1,234.5 -> 1234.5    .5 -> 0.50    6.72e-5 -> 0.0000672    1,00 != 100
    DECIMAL: decimal,
    # 6/4 -> 1.5    3:4 -> 3/4    3 1/2 -> 3.5    3\frac{1}{2} != \frac{31}{2}    1/0 != 0
    rf"(?:([0-9]+) (?=[0-9.]))?{DECIMAL}[/:]{DECIMAL}": ratio,
    # 3 \times 10^8 km -> 300000000    1.2*10^{-5} -> 0.000012    15000\times 20000 != 3\times10^8
    rf"{DECIMAL}(?:\\times|\\cdot|\*) ?10\^([0-9]|\{{-?[0-9]{{1,3}}\}})": scientific,
    # 0.1\overline{6} -> 1/6    0.(3) -> 1/3    .\overline{6} -> 2/3    0.\bar{3} != 0.3
    r"([0-9]*)\.([0-9]{0,9})(?:\\(?:overline|bar|dot)\{|\()([0-9]{1,9})[})]": repeating,
}
# -\frac{-35}{9} -> 35/9    1\frac{4}{5} -> 1.8
FRACTION = rf"\\frac\{{{DECIMAL}\}}\{{{DECIMAL}\}}"
# Brackets around a number: (1/2) -> 1/2    -(5) -> -5    \{5\} -> 5    3(1/2) != 3.5
BRACKETS = r"(?:^|(?<=[-+])|(?<=/)(?!.*%))(?:\(([^(),]*)\)|\\\{([^(),]*)\\\})(?=[/%]|$)"
# Signs around the form: - 5 -> -5    50% -> \frac{1}{2}
SIGNED = re.compile(r"([+-]?) ?(.*?)(%?)", re.DOTALL)


def parse_number(text):
    """The exact values of a number without and with its percent sign, or None.

    50% has the values 50 and 1/2. The text must come from `respell`.
    """
    text = re.sub(FRACTION, r" \1/\2", re.sub(BRACKETS, r"\1\2", drop_tail(text)))
    sign, body, percent = SIGNED.fullmatch(text.strip()).groups()
    for pattern, value_of in FORMS.items():
        match = re.fullmatch(pattern, body.strip())
        if match:
            value = value_of(*match.groups())
            if value is not None:
                value = -value if sign == "-" else value
                return value, value / 100 if percent else value
    return None


# Only algebra can compute a power or a root: 2^{10} -> 1024    5\cdot2^3 -> 40    2^3+1 != 9
# \sqrt[3]{8} -> 2    \sqrt{9+16} != 5
POWER_OR_ROOT = re.compile(
    r"[+-]?\(?(?:(?:[0-9.]+(?:\\times|\\cdot|\*) ?)?[0-9.]+\^(?:[0-9]|\{-?[0-9]+\})"
    r"|\\sqrt(?:\[[0-9]\])?\{[0-9.]+\})\)?"
)
# 8:34    08:34
TIME = re.compile(r"(?:[01]?[0-9]|2[0-3]):[0-5][0-9]")

# ---- rules: each returns True, False, or None where it cannot tell -------------------------------


def quick_verdict(answer, label):
    """The verdict of the first rule that can tell. None: only algebra can tell."""
    if answer.strip() == label.strip():
        return label.strip() != ""
    answer, label = prepare(answer, label)
    # Nothing equals an empty text. A text that is too long has become empty.
    if not answer or not label:
        return False
    verdict = same_number(answer, label)
    if verdict is not None:
        return verdict
    # The rules below read the words in \text{}: \text{red}, \text{blue} -> red,blue
    texts = [re.sub(r"\\text\{([^{}]*)\}", r"\1", text) for text in (answer, label)]
    answer, label = (text.replace(", ", ",").replace(") ", ")").strip() for text in texts)
    if answer == label:
        return True
    for rule in (same_choice, same_text, refuse_misread):
        verdict = rule(answer, label)
        if verdict is not None:
            return verdict
    return None


def same_number(answer, label):
    """Numbers are compared exactly. A percent sign may be left off: 0.5 -> 50%    50% -> 50

    If the label is a number, the answer must be one, because an expression may be a copy from the
    question: 3+4 != 7
    """
    number, label_number = parse_number(answer), parse_number(label)
    if not label_number:
        return None
    if not number:
        return None if POWER_OR_ROOT.fullmatch(drop_tail(answer)) else False
    # A time is no ratio: 10:30 != \frac{1}{3}    3:07 != \frac{3}{7}    08:30 -> 8:30
    # But a ratio in lowest terms may look like a time: 3:10 -> \frac{3}{10}    2:10 -> 1:5
    times = [bool(TIME.fullmatch(text)) for text in (answer, label)]
    top, bottom = label_number[0].as_integer_ratio()
    is_no_ratio = (":" in answer) != (":" in label) and f"{top}:{bottom}" not in (answer, label)
    if all(times) or (any(times) and is_no_ratio):
        return answer.lstrip("0") == label.lstrip("0")
    return number[0] == label_number[0] or number[1] == label_number[1]


def same_choice(answer, label):
    """A label from A to J is one of several choices. The answer may add the text of the choice.

    C. 12 m -> C    Option (C) -> C    A. 12; C. 14 != A    (a)(b) != A
    """
    choice = re.fullmatch(r"\(?([A-J])\)?", label)
    option = r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer) ?)?\(?([A-Ja-j])(?:[.:)](?!\()|$)"
    given = re.match(option, answer)
    if not choice or not given:
        return None
    others = set(re.findall(r"[ ,.:)]\(?([A-J])[.):]", answer)) - {choice[1]}
    return choice[1] == given[1].upper() and not others


def same_text(answer, label):
    """Words, numerals of a base and times are compared as texts: 52 != 52_8    seat != east

    Their case does not matter: MONDAY -> Monday    1a3_{16} -> (1A3)_{16}    8:34 pm -> 8:34 PM
    But a label in capitals names points of a figure: abcd != ABCD
    """
    in_base = r"\(?[0-9][0-9A-Fa-f]*\)?_\{?[0-9]+\}?"
    # A word has four letters or more, because xy is a product: yx -> xy
    if not re.fullmatch(rf"[A-Za-z' ]{{4,}}|[Yy]es|[Nn]o|[0-9:]+[AaPp]m|{in_base}", label):
        return None
    if not re.fullmatch(rf"[0-9:A-Za-z' -]+|{in_base}", answer):
        return None
    if re.fullmatch("[A-Z' ]+", label):
        return False  # An equal text was accepted before.
    answer, label = (re.sub(r"[(){}]", "", text).casefold() for text in (answer, label))
    return answer == label


RELATION = r"(?:[<>]|\\[lg]e(?![A-Za-z])) ?"
# An inequality is solved if a letter, or its negative, stands alone on one side: -x < -5 -> x > 5
SOLVED = re.compile(rf"(?:.*{RELATION})?[+-]?\\?[A-Za-z]+(?:_[0-9])?(?:$|,|{RELATION})")


def refuse_misread(answer, label):
    """False where algebra.py would accept a wrong answer, else None."""
    # A list has as many members as the label, and a pair has brackets: 3,3,5 != 3,5    1,2 != (1,2)
    # Inequalities, \mathbb{R} and matrices may equal texts of other shapes: x > 5 -> (5,\infty)
    if not re.search(rf"{RELATION}|\\(?:ne|mathbb|setminus|begin)(?![a-z])", answer + label):
        sizes = [text.count(",") + text.count("\\pm") for text in (answer, label)]
        has_brackets = re.fullmatch(r"\(.*,.*\)", label)
        if sizes[0] != sizes[1] or (has_brackets and not re.match(r"[^(\[]*[(\[].*,", answer)):
            return False
    # An equation is not a value: 2x+1 != y-1 = 2x
    if bool(EQUALS.search(answer)) != bool(EQUALS.search(label)):
        return False
    # An inequality that is not solved may be a copy from the question: x-2 > 0 != x > 2
    unsolved = [bool(re.search(RELATION, x)) and not SOLVED.match(x) for x in (answer, label)]
    if unsolved == [True, False]:
        return False
    # Algebra drops primes and bases, and reads the letters of an angle as a product:
    # f'(x) != f(x)    52_7+1 != 52_8+1    \angle ABC != \angle BAC
    if answer.count("'") != label.count("'"):
        return False
    return False if re.search(r"[0-9]_|\\(?:tri)?angle", answer + label) else None
