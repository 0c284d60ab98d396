"""Steps of Lookahead, worked by hand on letters from docs/methods/lookahead.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """One step, worked by hand.

    tree: a line per node, root first: its token, the target's pick there (Z where it does not matter), and which of
    the nodes so far it sees, itself included. num_candidates: the nodes after the root that come from the pool.
    accepted: the path. rows: the window after the step, root first. pool: tails of some keys after the step, the newest
    first.
    """

    tree: str
    accepted: str
    rows: list[str]
    pool: dict[str, list[str]]
    num_candidates: int = 0


# W = 5, N = 4, G = 2. Row 0 gets W + N − 3 = 6 tokens of the prompt EFGHIJA, whose last token is the root; refills
# go on with A, E, F, …
PROMPT = "EFGHIJA"
WARM_UP_1 = Pass(
    """
    A B #
    E K ##
    F L ###
    G M ####
    H N #####
    I O ######
    J P #######
    """,
    accepted="",
    rows=["BFGHIJ", "KLMNOP"],
    pool={"A": [], "E": []},
)
WARM_UP_2 = Pass(
    """
    B C #
    K Q ##
    F Z #.#
    L R #.##
    G Z #.#.#
    M S #.#.##
    H Z #.#.#.#
    N T #.#.#.##
    I Z #.#.#.#.#
    O U #.#.#.#.##
    J Z #.#.#.#.#.#
    P V #.#.#.#.#.##
    """,
    accepted="",
    rows=["CGHIJ", "LMNOP", "RSTUV"],
    pool={"B": [], "F": []},
)
FIRST_NGRAMS = Pass(
    """
    C D #
    L Z ##
    R M ###
    G Z #..#
    M Z #..##
    S b #..###
    H Z #..#..#
    N Z #..#..##
    T c #..#..###
    I Z #..#..#..#
    O Z #..#..#..##
    U d #..#..#..###
    J Z #..#..#..#..#
    P Z #..#..#..#..##
    V e #..#..#..#..###
    """,
    accepted="",
    rows=["DMNOP", "RSTUV", "Mbcde"],
    pool={"C": ["LRM"], "G": ["MSb"], "H": ["NTc"], "I": ["OUd"], "J": ["PVe"], "D": []},
)
NOTHING_ACCEPTED = Pass(
    """
    D G #
    R Z ##
    M f ###
    M Z #..#
    S Z #..##
    b g #..###
    N Z #..#..#
    T Z #..#..##
    c h #..#..###
    O Z #..#..#..#
    U Z #..#..#..##
    d i #..#..#..###
    P Z #..#..#..#..#
    V Z #..#..#..#..##
    e j #..#..#..#..###
    """,
    accepted="",
    rows=["GSTUV", "Mbcde", "fghij"],
    pool={"D": ["RMf"], "M": ["Sbg"], "N": ["Tch"], "O": ["Udi"], "P": ["Vej"], "G": ["MSb"]},
)
TWO_ACCEPTED = Pass(  # the candidate M S b; the window's M of column 0 is the candidate's node
    """
    G M #
    M S ##
    S X ###
    b Z ####
    f k ##..#
    S Z #....#
    b Z #....##
    g l #....###
    T Z #....#..#
    c Z #....#..##
    h m #....#..###
    U Z #....#..#..#
    d Z #....#..#..##
    i n #....#..#..###
    V Z #....#..#..#..#
    e Z #....#..#..#..##
    j o #....#..#..#..###
    """,
    accepted="MS",
    rows=["XdeAE", "hijFG", "mnoHI"],
    pool={"G": ["Mfk", "MSb"], "S": ["bgl"], "T": ["chm"], "U": ["din"], "V": ["ejo"]},
    num_candidates=3,
)
REFILLED = Pass(
    """
    X G #
    h Z ##
    m p ###
    d Z #..#
    i Z #..##
    n q #..###
    e Z #..#..#
    j Z #..#..##
    o r #..#..###
    A Z #..#..#..#
    F Z #..#..#..##
    H s #..#..#..###
    E Z #..#..#..#..#
    G Z #..#..#..#..##
    I t #..#..#..#..###
    """,
    accepted="",
    rows=["GijFG", "mnoHI", "pqrst"],
    pool={"X": ["hmp"], "d": ["inq"], "e": ["jor"], "A": ["FHs"], "E": ["GIt"]},
)
TWO_CANDIDATES = Pass(  # they share M; both have left the pool after the step, because G has two newer tails
    """
    G M #
    M f ##
    f k ###
    k Y ####
    S Z ##..#
    b Z ##..##
    m Z #.....#
    p u #.....##
    i Z #.......#
    n Z #.......##
    q v #.......###
    j Z #.......#..#
    o Z #.......#..##
    r w #.......#..###
    F Z #.......#..#..#
    H Z #.......#..#..##
    s x #.......#..#..###
    G Z #.......#..#..#..#
    I Z #.......#..#..#..##
    t y #.......#..#..#..###
    """,
    accepted="Mfk",
    rows=["YIJAE", "stFGH", "xyIJA"],
    pool={"G": ["Ity", "mpu"], "i": ["nqv"], "j": ["orw"], "F": ["Hsx"]},
    num_candidates=5,
)
ACCEPTED_IN_WARM_UP = Pass(
    """
    A E #
    E F ##
    F Q ###
    G M ####
    H N #####
    I O ######
    J P #######
    """,
    accepted="EF",
    rows=["QHIJAE", "MNOPFG"],
    pool={"A": []},
)
