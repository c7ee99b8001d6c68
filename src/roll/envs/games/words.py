"""Word lists of the word games."""

from __future__ import annotations

import functools

__all__ = ["list_words"]

_COMMON_WORDS = """
act add age air and ant arm art ask axe bad bag bat bed bee big bird bit box boy bus buy cap car cat cow cry cup cut
day dog dry ear eat egg end eye far fat few fig fire fit fly fog fox fun gas get gift gold hat hen hot ice ink jam jar
job joy key kid leg lip log low man map mix mud net new nut oil old one our out owl own pan pen pet pie pig pin pot
put rag rain rat red row rub run sad saw sea see set shy sit six sky son sun tax tea ten tie tin top toy try two use
van wax web wet why win yes you zoo

able army baby back ball band bank base bath bear bell belt best bird blue boat body bone book born both bowl burn
cake call camp card care cave chin city clay club coal coat cold cook cool copy corn crop dark date deep desk door
down drop drum duck dust each east edge face fact fall farm fast fear feet fire fish five flag flat foot fork four
free frog full game gate gift girl give goat gold good hair half hall hand hard head heat help hill hole home hope
horn hour iron join jump keep kind king kiss knee knot lake lamp land last leaf left life lift line lion list long
loud love luck make mark meal meat milk mind moon more move much nail name near neck need news nose note open oven
page pain park part past path play plum pool poor pull pump pure race rain read rice rich ride ring road rock roof
room root rope rose salt sand seed send ship shoe shop side silk size skin sleep slow snow soap sock soft song soup
star stem stop swim tail talk tall team tent time town tree turn unit vast verb very wait walk wall warm wash wave
week west wide wild wind wine wing wire wise wolf wood wool word work yard year zero

actor adult after again alone angry apple arrow baker beach begin below berry birth black blade block blood board
bread brick bring broad brown brush build cabin candy carry chain chair chalk cheap cheek chess chest chief child
clean clear clock cloth cloud coast color corner count cover crane cream cross crowd crown dance daily depth dream
dress drink drive eagle early earth eight empty enemy enjoy equal event every fence field fight final flame floor
flour fruit funny ghost giant glass glove grain grape grass great green group guard guest happy heart heavy honey
horse hotel house human ivory jelly judge juice knife large laugh layer learn lemon level light limit local lucky
lunch magic maple march metal money month motor mouse mouth movie music night noise north nurse ocean offer olive
onion opera orbit order paint paper party peace pearl piano pilot place plain plane plant plate point porch price
pride prize proud queen quick quiet quilt radio ranch raven reach river robin robot rough round royal salad scale
score sharp sheep shelf shell shirt shore short silly skirt sleep slice small smart smile smoke snake solid sound
south space spice spoon sport staff stage stair stamp steam steel stick stone store storm story stove sugar sweet
table taste teach tiger toast tooth touch towel tower track trade train truck uncle under upper value visit voice
wagon waste watch water wheat wheel white world worry wound write young youth zebra

animal answer autumn banana basket battle beauty bottle branch bridge bright bronze butter button camera candle canvas
carpet castle cattle cheese cherry church circle coffee copper corner cotton county custom danger decade desert dinner
doctor donkey dragon engine family farmer father feather finger flower forest friend garden ginger guitar hammer
harbor helmet hunger island jacket jungle kettle kitten ladder leader lesson letter lizard magnet marble market meadow
middle minute mirror monkey morning mother museum needle number orange owner palace parent pebble pencil pepper planet
pocket potato prince purple puzzle rabbit ribbon rocket saddle school season secret shadow silver sister spider spring
square stable street summer sunset system temple thread throat ticket timber tomato tongue travel tunnel turtle valley
velvet violin visitor wallet walnut weapon weather window winter wonder yellow

account airport balance balloon baggage barrier bedroom bicycle blanket brother builder cabbage captain carrier
cartoon century chapter chicken citizen climate college compass concert cottage country crystal culture curtain
cushion dentist desktop diamond dolphin drawing economy emperor engine evening example factory farming fashion feather
fiction fishing fitness foreign fortune freedom gallery garment general glasses gravity grocery habitat harvest
healthy herself history holiday husband husband iceberg journey justice kitchen kingdom lantern leather library
lobster machine manager medical message mineral miracle mission mixture morning mustard natural neither network
nothing officer orchard outside package painter pattern payment penguin perfect pilgrim plastic popular pottery
present private problem process promise pumpkin quality quarter rainbow reality receipt recipes regular respect
rooster sailing science seaside service shelter silence society soldier station stomach storage strange student
subject success sunrise support surface teacher theater thunder traffic trainer trouble uniform vehicle village
vitamin volcano warrior weather website welcome western whisper
"""

_RARE_WORDS = """
adz ale ape asp awl bog cob cub dew dye eel elm emu fen fir gem gnu hem hub ivy jay keg kin lea lye mar moa nib oar
ode orb ore paw ply rye sap sod sty tor urn vat vex vow yak yam yew zap

apse arid avid balm bard bask bevy bilk brig brim cede chaff chic clad cleft coda cove crag daub deft dirge dour dusk
eddy ewer fawn feud fief flax foal gait gild glen glib gnat grit gust hewn hilt hive husk iris jade jolt kelp kiln
knob lair lark loom lute mane mire moat musk nook oath opal pact perk plow quay quill reed rift rune silo sloe stoa
swan tarn tier tusk vale veil vial wane wick wisp yoke zeal zest

abyss acorn adage adobe agate alloy amber anvil aspen atoll balsa banjo bayou birch briar brine cache cairn camel
caulk cedar chasm civet clasp cobra comet coral crypt cubit delta dirge druid easel ember epoch fable ferry fjord
flint flute forge gable gnome gouge grail guild gully heron hinge hoard ingot inlet ivory joist kayak knoll lathe
ledge lilac llama lyric manor mason merit mirth moose nexus oasis okapi onset otter ovoid panda parka pivot plaza
plume prism quail quark quart quoit rivet sable sedge shale shawl sieve skiff sloop spire squid stork swamp talon
tapir tepid thorn topaz trout tulip tunic umber usher vault viola viper visor waltz wharf widow yacht yeast

abacus almond anchor aurora badger ballad bamboo barley basalt beacon bobbin bonnet brooch burrow cactus canyon cavern
cobalt cobweb cygnet damask dynamo enamel falcon ferret fossil galaxy gazebo geyser glacier goblet gravel grotto
hamlet hermit hornet hyphen indigo jigsaw kernel lagoon lichen lintel locust magpie mantle meteor millet mortar nectar
nettle nickel nutmeg oracle osprey oxygen oyster parrot pewter pigeon pillar plough poplar python quartz quiver ramrod
raisin sandal scythe sextant shovel sickle sphinx spruce stupor tallow tassel thatch thistle trowel tundra turnip
typhoon walrus weasel willow zephyr zodiac

alchemy almanac amulets anemone antenna apricot archway armored asphalt bagpipe bassoon bayonet beehive bellows
bittern boulder bramble buffalo cadence caravan caribou cavalry chamois chimney chisels cistern citadel cobbler
conifer corsair cricket curator cyclone damsons dervish drought dungeon eclipse elegant emerald equator estuary
falcons firefly flotsam foundry gazelle gherkin glacier gondola granite griffin gristle hammock harpoon heather
hexagon hoister isthmus javelin juniper kestrel krypton lagoons lattice lozenge mammoth mandrel maypole meander
mercury minaret monsoon narwhal nomadic obelisk octopus octagon origami osmosis ostrich paddock panther papyrus
parsley peacock pelican pendant phoenix pioneer plateau prairie pyramid quarrel quinine raccoon rampart rhubarb
sapling scallop scepter seagull serpent sextant spinach squalls stirrup sundial tadpole talcums tempest terrace
thicket thistle tornado trellis truffle turbine unicorn vampire vintage vulture walnuts warbler
"""


@functools.cache
def list_words(length: int | None = None, rare: bool = False) -> tuple[str, ...]:
    """Return words in capitals, in alphabetical order.

    Args:
        length: The number of letters of each word; None for any length.
        rare: Whether to return the less common words instead of the common ones.
    """
    source = _RARE_WORDS if rare else _COMMON_WORDS
    return tuple(sorted({word.upper() for word in source.split() if length is None or len(word) == length}))
