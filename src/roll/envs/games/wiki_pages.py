"""A small encyclopedia: pages with a sentence and links."""

from __future__ import annotations

import functools
from dataclasses import dataclass

__all__ = ["Page", "list_pages"]

_PAGES = """
Earth | The third planet from the Sun, and the only one known to bear life. | Sun; Moon; Ocean; Atmosphere; Continent
Sun | The star at the centre of the Solar System. | Earth; Star; Light; Energy; Solar System
Moon | The natural satellite of Earth, which causes the tides. | Earth; Tide; Crater; Astronaut
Star | A ball of plasma that shines by nuclear fusion. | Sun; Galaxy; Light; Constellation; Fusion
Solar System | The Sun and all that moves around it. | Sun; Planet; Comet; Asteroid
Planet | A large round body that moves around a star. | Earth; Mars; Jupiter; Solar System
Mars | The fourth planet from the Sun, red with rust. | Planet; Iron; Volcano; Space probe
Jupiter | The largest planet of the Solar System. | Planet; Storm; Telescope
Comet | An icy body with a tail when it is near the Sun. | Solar System; Ice; Telescope
Asteroid | A rocky body, smaller than a planet. | Solar System; Crater; Iron; Dinosaur
Crater | A round hollow made by an impact or a volcano. | Asteroid; Moon; Volcano
Galaxy | Billions of stars that are held together by gravity. | Star; Gravity; Telescope
Constellation | A pattern of stars in the night sky. | Star; Mythology; Navigation
Gravity | The force by which masses attract each other. | Isaac Newton; Albert Einstein; Tide; Planet
Tide | The rise and fall of the sea, due to the Moon and the Sun. | Moon; Ocean; Gravity
Light | Radiation that the eye can see. | Eye; Colour; Telescope; Energy; Albert Einstein
Fusion | The joining of light nuclei, which releases energy. | Star; Hydrogen; Energy
Telescope | An instrument for seeing what is far away. | Lens; Galileo Galilei; Galaxy; Light
Galileo Galilei | An Italian astronomer who saw the moons of Jupiter. | Telescope; Jupiter; Italy; Physics
Isaac Newton | An English physicist who described motion and gravity. | Gravity; Physics; Mathematics; England
Albert Einstein | A physicist known for the theory of relativity. | Physics; Gravity; Light; Violin
Physics | The science of matter, energy and motion. | Energy; Isaac Newton; Mathematics; Atom
Mathematics | The study of numbers, shapes and structure. | Number; Geometry; Physics; Computer
Number | What counts and measures. | Mathematics; Money; Calendar
Geometry | The part of mathematics that deals with shapes. | Mathematics; Greece; Architecture
Atom | The smallest part of a chemical element. | Hydrogen; Iron; Chemistry; Physics
Chemistry | The science of substances and how they react. | Atom; Water; Salt; Medicine
Hydrogen | The lightest element, of which most of the Sun consists. | Atom; Water; Fusion
Iron | A metal of tools, bridges and magnets. | Steel; Atom; Magnet; Blood
Steel | Iron with a little carbon, which makes it strong. | Iron; Bridge; Ship; Railway
Magnet | A thing that attracts iron. | Iron; Compass; Electricity
Compass | An instrument that points to the north. | Magnet; Navigation; China
Navigation | Finding the way across sea, land or air. | Compass; Ship; Map; Constellation
Map | A drawing of a part of the world. | Navigation; Continent; Paper
Energy | What is needed to do work. | Electricity; Sun; Physics; Food
Electricity | The flow of electric charge. | Light; Magnet; Computer; Storm
Computer | A machine that follows programs. | Mathematics; Electricity; Internet; Chess
Internet | The network that connects computers across the world. | Computer; Library; Telephone
Telephone | A device for talking over a distance. | Electricity; Internet; Language
Ocean | The salt water that covers most of Earth. | Water; Salt; Whale; Ship; Tide
Water | A liquid of hydrogen and oxygen that all life needs. | Hydrogen; Ice; River; Ocean
Ice | Water that is frozen. | Water; Glacier; Penguin
Glacier | A river of ice that flows slowly. | Ice; Mountain; River; Climate
River | Water that flows to the sea. | Water; Bridge; Nile; Fish
Nile | A long river of Africa. | River; Egypt; Africa; Crocodile
Salt | White crystals that season and preserve food. | Ocean; Chemistry; Food
Mountain | Land that rises high above what is around it. | Glacier; Volcano; Goat; Himalaya
Himalaya | The highest mountains of the world. | Mountain; Asia; Tea
Volcano | A mountain that throws out lava and ash. | Mountain; Island; Crater; Italy
Island | Land with water on all sides. | Ocean; Volcano; Japan; Pirate
Continent | One of the great masses of land. | Africa; Asia; Europe; Earth
Africa | The continent of the Nile and the Sahara. | Continent; Nile; Lion; Desert; Elephant
Asia | The largest continent. | Continent; China; India; Japan; Himalaya
Europe | The continent west of Asia. | Continent; Italy; Greece; England; France
Egypt | The land of the pyramids, on the Nile. | Nile; Pyramid; Africa; Cat
Pyramid | A building with a square base and a pointed top. | Egypt; Geometry; Architecture
China | A country of Asia where paper was invented. | Asia; Paper; Tea; Silk; Compass
India | A country of Asia, where chess comes from. | Asia; Chess; Tea; Elephant; Cotton
Japan | A country of islands in the east of Asia. | Asia; Island; Tea; Railway
Italy | A country of Europe in the shape of a boot. | Europe; Rome; Violin; Volcano; Opera
Rome | The capital of Italy and once of an empire. | Italy; Calendar; Architecture; Latin
Greece | A country of Europe where democracy began. | Europe; Mythology; Olive; Theatre; Geometry
England | A country of Europe on an island. | Europe; William Shakespeare; Football; Railway; Tea
France | A country of Europe known for wine and cheese. | Europe; Wine; Cheese; Bicycle
Latin | The language of ancient Rome. | Rome; Language; Medicine
Language | How people speak and write. | Latin; Book; Poetry; Brain
William Shakespeare | An English poet and writer of plays. | Theatre; Poetry; England
Theatre | A place where plays are acted. | William Shakespeare; Opera; Greece
Opera | A play that is sung. | Theatre; Music; Italy
Music | The art of sounds. | Violin; Piano; Opera; Ear; Mathematics
Violin | An instrument with four strings and a bow. | Music; Wood; Horse; Italy
Piano | An instrument with black and white keys. | Music; Wood; Ivory
Ivory | The white material of tusks. | Elephant; Piano; Chess
Poetry | The art of verse. | Language; Book; William Shakespeare
Book | Pages that are bound together. | Paper; Library; Poetry
Library | A house of books. | Book; Internet; University
University | A place of higher learning. | Library; Mathematics; Medicine; Italy
Paper | Thin sheets made of wood or rags. | Wood; China; Book; Money
Money | What is paid with. | Number; Paper; Gold; Trade
Gold | A yellow metal that does not rust. | Money; Pirate; Egypt
Trade | Buying and selling. | Money; Ship; Silk; Salt
Ship | A large vessel that crosses the sea. | Ocean; Pirate; Navigation; Trade; Steel
Pirate | A robber at sea. | Ship; Gold; Island; Parrot
Parrot | A bird that can learn to speak. | Bird; Language; Forest
Bird | An animal with feathers and wings. | Penguin; Parrot; Egg; Dinosaur; Flight
Penguin | A bird that swims and cannot fly. | Bird; Fish; Ice
Flight | Moving through the air. | Bird; Aeroplane; Insect
Aeroplane | A machine that flies with fixed wings. | Flight; Engine; Map
Engine | A machine that turns energy into motion. | Energy; Railway; Aeroplane; Steel
Railway | A way of rails for trains. | Steel; Engine; Bridge
Bridge | It crosses a river or a valley. | River; Steel; Architecture
Architecture | The art of building. | Bridge; Pyramid; Rome; Wood
Bicycle | A vehicle with two wheels and pedals. | Steel; France; Football
Football | A game of two teams and a ball. | England; Bicycle; Television
Television | Moving pictures that are sent over a distance. | Electricity; Football; Theatre
Chess | A game for two on a board of 64 squares. | India; Computer; Mathematics
Dinosaur | A reptile of long ago. | Bird; Fossil; Asteroid; Reptile
Fossil | Remains of life of long ago, in rock. | Dinosaur; Evolution; Mountain
Evolution | How living things change over generations. | Fossil; Charles Darwin; Animal
Charles Darwin | An English scientist who explained evolution. | Evolution; Island; England; Ship
Animal | A living thing that moves and eats. | Fish; Bird; Insect; Mammal; Reptile
Mammal | An animal that feeds its young with milk. | Whale; Lion; Elephant; Milk; Animal
Whale | The largest animal, a mammal of the sea. | Ocean; Mammal; Music
Lion | A big cat that lives in prides. | Cat; Africa; Mammal
Cat | A pet that hunts mice. | Lion; Egypt; Milk; Eye
Elephant | The largest animal on land. | Ivory; Africa; India; Mammal
Goat | An animal with horns that climbs mountains. | Milk; Cheese; Mountain
Horse | An animal that people ride. | Mammal; Violin; Trade
Reptile | An animal with scales that warms itself in the sun. | Crocodile; Dinosaur; Egg; Sun
Crocodile | A large reptile of rivers. | Reptile; Nile; Bird
Fish | An animal that breathes in water. | Ocean; River; Egg; Penguin
Insect | A small animal with six legs. | Bee; Flight; Silk; Forest
Bee | An insect that makes honey. | Insect; Honey; Flower
Honey | Sweet food made by bees. | Bee; Food; Sugar
Sugar | Sweet crystals from cane or beets. | Food; Honey; Tea; Chemistry
Egg | A bird or reptile grows in it. | Bird; Reptile; Food
Milk | White food of young mammals. | Mammal; Cheese; Food
Cheese | Food made of milk. | Milk; France; Goat; Salt
Food | What is eaten. | Bread; Cheese; Salt; Energy; Fish
Bread | Food baked of flour and water. | Food; Wheat; Salt
Wheat | A grass that is grown for its grain. | Bread; Climate; Trade
Wine | A drink made of grapes. | France; Food; Olive
Olive | A small fruit that gives oil. | Greece; Food; Wine
Tea | A drink of leaves and hot water. | China; India; England; Water; Sugar
Silk | A fine thread that a moth's larva spins. | China; Insect; Trade
Cotton | A plant whose fibres are spun. | India; Flower; Trade
Flower | The part of a plant that makes seeds. | Bee; Cotton; Colour; Forest
Forest | Land that is covered with trees. | Wood; Bird; Climate; Insect
Wood | The material of trees. | Forest; Paper; Ship; Violin
Climate | What the weather is like over many years. | Atmosphere; Forest; Desert; Glacier
Atmosphere | The gases around a planet. | Earth; Climate; Storm; Flight
Storm | Strong wind with rain or snow. | Atmosphere; Electricity; Ship
Desert | Dry land where little grows. | Climate; Africa; Egypt
Mythology | Old stories of gods and heroes. | Greece; Constellation; Poetry
Calendar | How days are counted. | Number; Moon; Rome; Sun
Colour | How the eye sees different kinds of light. | Light; Eye; Flower
Eye | The organ of sight. | Light; Colour; Brain; Lens
Lens | A piece of glass that bends light. | Telescope; Eye; Light
Ear | The organ of hearing. | Music; Brain; Mammal
Brain | The organ that thinks. | Eye; Ear; Blood; Language; Computer
Blood | The red liquid that a heart pumps. | Iron; Heart; Medicine
Heart | The muscle that pumps blood. | Blood; Medicine; Poetry
Medicine | The science of healing. | Blood; Heart; Chemistry; University
Space probe | A machine that explores other planets. | Mars; Jupiter; Computer; Astronaut
Astronaut | A person who travels into space. | Moon; Space probe; Earth
"""


@dataclass(frozen=True, kw_only=True)
class Page:
    """One page: its title, a sentence, and the titles that it links to."""

    title: str
    text: str
    links: tuple[str, ...]


@functools.cache
def list_pages() -> dict[str, Page]:
    """Return all pages by title."""
    parts = (line.split(" | ") for line in _PAGES.strip().splitlines())
    return {title: Page(title=title, text=text, links=tuple(links.split("; "))) for title, text, links in parts}
