"""Words of the crossword, and their clues."""

from __future__ import annotations

import functools

__all__ = ["list_clues"]

_EASY_CLUES = """
ant: insect that lives in a colony with a queen
arm: it joins the hand to the shoulder
bed: what you sleep in
bee: insect that makes honey
box: cardboard container
bus: it carries many passengers through a city
cat: pet that purrs
cow: farm animal that gives milk
cup: you drink tea from it
dog: pet that barks
ear: you hear with it
egg: a hen lays it
eye: you see with it
fox: red animal with a bushy tail
hat: you wear it on your head
hen: female chicken
ice: frozen water
ink: a pen is filled with it
jam: sweet fruit spread for bread
key: it opens a lock
leg: you stand on it
map: drawing that shows where places are
nut: fruit with a hard shell
owl: bird that hunts at night
pan: you fry in it
pen: you write with it
pig: farm animal with a curly tail
sea: large body of salt water
sun: star at the centre of our planets
tea: hot drink made of leaves
ten: five times two
van: vehicle for goods, smaller than a lorry
wax: candles are made of it
zoo: place where wild animals are shown
bank: place where money is kept
bear: large furry animal that likes honey
bell: it rings
bird: animal with feathers
boat: it floats and carries people
book: it has pages and a cover
bowl: round dish for soup
cake: sweet thing with candles on a birthday
cave: hollow place in a mountain
coat: you wear it over other clothes in winter
corn: yellow grain that pops
desk: table for writing
door: you go into a room through it
drum: you beat it to make music
duck: bird that quacks
fish: animal that breathes in water
flag: piece of cloth that stands for a country
foot: it has five toes
fork: you eat with it, beside a knife
frog: green animal that croaks and jumps
gate: door in a fence
goat: animal with horns that climbs mountains
gold: yellow precious metal
hair: it grows on your head
hand: it has five fingers
horn: it grows on the head of a bull
iron: metal that rusts
king: man with a crown
kite: it flies in the wind on a string
lamp: it gives light in a room
leaf: green part of a tree that falls in autumn
lion: big cat with a mane
milk: white drink from a cow
moon: it goes around the earth
nail: you hit it with a hammer
neck: it carries the head
nest: home that a bird builds
nose: you smell with it
oven: bread is baked in it
pear: green fruit, narrow at one end
rain: water that falls from clouds
ring: jewel for a finger
road: cars drive on it
roof: top of a house
rope: thick cord
rose: flower with thorns
salt: white grains that season food
sand: a beach is made of it
ship: it crosses oceans
shoe: you wear it on your foot
snow: white flakes that fall in winter
soap: you wash your hands with it
sock: you wear it inside a shoe
star: point of light in the night sky
tail: a dog wags it
tent: you camp in it
tree: tall plant with a trunk
wall: side of a room
wind: moving air
wolf: wild animal that howls
apple: fruit that is said to keep the doctor away
bread: a baker makes it of flour
brush: you paint with it
chair: furniture to sit on
chess: board game with kings and queens
clock: it tells the time
cloud: rain comes from it
cream: thick part of milk
eagle: large bird of prey
flour: powder that bread is made of
ghost: it haunts old houses in stories
grape: wine is made of it
grass: green plants of a lawn
honey: sweet food made by bees
horse: animal that people ride
house: building that a family lives in
juice: drink pressed from fruit
knife: you cut with it
lemon: sour yellow fruit
mouse: small animal that likes cheese
music: art of sounds
night: it is dark then
ocean: very large sea
onion: vegetable that makes you cry
paper: books are printed on it
piano: instrument with black and white keys
pilot: person who flies a plane
plate: flat dish
queen: woman with a crown
river: water that flows to the sea
robot: machine that works by itself
sheep: wool comes from it
shirt: garment with a collar and sleeves
smoke: it rises from a fire
snake: animal without legs
spoon: you eat soup with it
stone: small piece of rock
storm: bad weather with strong wind
sugar: white and sweet, for tea
table: furniture to eat at
tiger: big cat with stripes
tooth: a dentist cares for it
train: it runs on rails
truck: large vehicle for goods
water: you drink it when you are thirsty
whale: largest animal of the sea
wheel: a bicycle has two of it
zebra: African animal with stripes
banana: long yellow fruit
bottle: container for wine
bridge: it crosses a river
butter: yellow spread made of cream
camera: you take pictures with it
candle: it gives light while it melts
carrot: orange vegetable that rabbits like
castle: home of a king
cheese: food made of milk, with holes in Switzerland
church: building with a steeple
coffee: hot drink made of roasted beans
desert: dry land of sand
doctor: person who heals
donkey: animal with long ears, smaller than a horse
dragon: it breathes fire in tales
farmer: person who grows food
finger: part of a hand
flower: coloured part of a plant
forest: land with many trees
garden: place beside a house where flowers grow
guitar: instrument with six strings
hammer: tool for nails
island: land with water all around
kitten: young cat
ladder: you climb it, rung by rung
letter: it is sent in an envelope
market: place where food is sold
mirror: you see yourself in it
monkey: animal that climbs trees and likes bananas
needle: you sew with it
orange: round fruit with the name of its colour
pencil: it writes in grey and can be erased
planet: earth is one
potato: chips are made of it
rabbit: animal with long ears that hops
rocket: it flies into space
school: place where children learn
silver: metal of second prizes
spider: it spins a web
summer: warmest season
thread: it goes through the eye of a needle
ticket: you need it to board a train
tomato: red fruit of salads and ketchup
turtle: animal that carries a shell
window: opening in a wall, with glass
winter: coldest season
"""

_HARD_CLUES = """
ale: beer brewed without a lager's patience
asp: small snake of a queen's last hour
awl: a cobbler makes holes with it
elm: tree that a fungus felled across Europe
emu: second tallest bird there is
ewe: she is in the flock, he is the ram
gnu: antelope, or software that is not Unix
ivy: it climbs the walls of old universities
oar: it makes a boat go without wind
ode: lyric poem that praises
ore: rock from which metal is won
rye: grain of dark bread and of whiskey
urn: vase for ashes
yew: churchyard tree of longbows
apse: rounded end of a church, behind the altar
balm: ointment that soothes
brig: ship with two masts, or a jail aboard
clef: sign at the beginning of a stave
coda: passage that ends a piece of music
crag: steep rugged rock
dirk: dagger of the Highlands
dirge: song for the dead
ewer: jug with a wide mouth
fief: land that a vassal held of his lord
flax: blue-flowered plant of linen
foal: young of a mare
gaff: hook for landing large fish
helm: where a ship is steered
hilt: handle of a sword
iris: coloured part of the eye
jade: green stone that was carved in China
kiln: oven for pottery
knot: unit of speed at sea
loom: frame on which cloth is woven
lute: plucked ancestor of the guitar
moat: ditch with water around a castle
opal: gem with a play of colours
quay: where ships are unloaded
reef: ridge of coral
rune: letter of the Vikings
silo: tower for grain
tarn: small lake in the mountains
toga: garment of a Roman citizen
tusk: ivory comes from it
veil: it hides a bride's face
yoke: wooden beam across the necks of oxen
abbot: head of a monastery
adobe: brick that was dried in the sun
alibi: proof of having been elsewhere
amber: fossil resin, often with an insect inside
anvil: a smith hammers on it
aorta: largest artery
atoll: ring of coral around a lagoon
basil: herb of pesto
bayou: slow creek of Louisiana
cairn: heap of stones that marks a way
chord: three notes or more at once
cobra: snake with a hood
comet: visitor of the sun with a long tail
crypt: vault beneath a church
delta: mouth of a river with many arms
easel: stand for a painter's canvas
fjord: narrow inlet of Norway's coast
flint: stone that gives sparks
gnome: small figure in a garden
heron: wading bird with a long neck
igloo: house built of snow
joust: contest of knights with lances
kayak: canoe that reads the same backwards
llama: woolly beast of burden of the Andes
magma: molten rock beneath the surface
nexus: connection, or centre of connections
oasis: green place in a desert
otter: river animal that likes to play
plumb: exactly vertical
prism: it splits light into colours
quail: small game bird with tiny eggs
quill: pen made of a feather
raven: black bird that said nevermore
siege: it is laid to a castle
sloop: sailing boat with one mast
talon: claw of a bird of prey
topaz: yellow gem of November
viola: it is tuned a fifth below the violin
waltz: dance in three-four time
yacht: boat of the wealthy
abacus: frame with beads for reckoning
anchor: it keeps a ship in its place
bamboo: tall grass that pandas eat
basalt: dark rock of lava
beacon: fire or light that guides ships
canyon: deep gorge cut by a river
cipher: secret way of writing
cobalt: metal of deep blue pigments
falcon: fastest bird in its dive
fossil: remains of life in a rock
galaxy: billions of stars together
geyser: spring that throws hot water into the air
goblet: drinking glass with a stem
grotto: small cave, often made for a garden
hermit: person who lives alone, or a crab
jigsaw: puzzle that was sawn of wood
lichen: alga and fungus living as one
magnet: it attracts iron
meteor: shooting star
mortar: it holds bricks together
nickel: metal of small coins
oracle: Delphi had a famous one
oxygen: gas that fire needs
oyster: a pearl grows in it
pewter: alloy of tin for mugs
quartz: crystal that keeps watches right
sickle: curved blade for reaping
sphinx: it asked Oedipus a riddle
tundra: treeless plain of the far north
turban: cloth that is wound around the head
walrus: sea mammal with long tusks
zephyr: gentle wind from the west
"""


@functools.cache
def list_clues(hard: bool = False) -> dict[str, str]:
    """Return a clue for each hard word if `hard` is set, otherwise for each easy word; the words are in capitals."""
    pairs = (line.partition(": ") for line in (_HARD_CLUES if hard else _EASY_CLUES).strip().splitlines())
    return {word.upper(): clue for word, _, clue in pairs}
