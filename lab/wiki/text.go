// SPDX-License-Identifier: Apache-2.0

package wiki

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// templates are pages that other pages include with parameters. To expand them is a large part of
// the work of MediaWiki's parser, as in an encyclopedia.
var templates = []struct{ title, text string }{
	{"Template:Infobox", `{| class="wikitable" style="float: right; width: 20em"
! colspan="2" | {{{name}}}
|-
! Region
| [[{{{region}}}]]
|-
! Founded
| {{{year|unknown}}}
|-
! Population
| {{{population|unknown}}}
|-
! Known for
| {{{known}}}
|}`},
	{"Template:Source", `<small>({{{author}}}: ''{{{title}}}'', {{{year}}}, p. {{{page|1}}})</small>`},
	{"Template:Note", `<div style="border: 1px solid #aaa; padding: 0.5em">'''Note:''' {{{1}}}</div>`},
}

// text returns the wikitext of the page with the given rank.
func (w *Wiki) text(page int) string {
	a := &author{wiki: w, r: w.random(streamPages + uint64(page))}
	target := size(a.r) // in bytes
	if a.r.IntN(2) == 0 {
		fmt.Fprintf(a, "{{Infobox|name=%s|region=%s|year=%d|population=%d|known=%s}}\n",
			w.titles[page], a.title(), 1000+a.r.IntN(1000), a.r.IntN(1e6), a.words(5))
	}
	fmt.Fprintf(a, "'''%s''' %s\n", w.titles[page], a.paragraph())
	for a.Len() < target {
		a.section()
	}
	for range 1 + a.r.IntN(3) {
		fmt.Fprintf(a, "[[Category:%s]]\n", capital(w.words[a.r.IntN(categories)]))
	}
	return a.String()
}

// author writes one page. It contains the text so far.
type author struct {
	strings.Builder
	wiki *Wiki
	r    *rand.Rand
}

// title returns the title of a page for a link. It draws the page by popularity.
func (a *author) title() string { return a.wiki.titles[a.wiki.page.draw(a.r)] }

// words returns n words, drawn by popularity, with blanks between them.
func (a *author) words(n int) string {
	words := make([]string, n)
	for i := range words {
		words[i] = a.wiki.words[a.wiki.word.draw(a.r)]
	}
	return strings.Join(words, " ")
}

// sentence returns a sentence. Half of the sentences have a link.
func (a *author) sentence() string {
	text := capital(a.words(4 + a.r.IntN(12)))
	switch a.r.IntN(6) {
	case 0, 1:
		text += fmt.Sprintf(" [[%s]] %s", a.title(), a.words(3))
	case 2:
		text += fmt.Sprintf(" [[%s|%s]]", a.title(), a.words(2))
	case 3:
		text += fmt.Sprintf(" ''%s''", a.words(2))
	}
	return text + "."
}

// paragraph returns three to seven sentences. With a probability of one half, a source follows
// them.
func (a *author) paragraph() string {
	var sentences []string
	for range 3 + a.r.IntN(5) {
		sentences = append(sentences, a.sentence())
	}
	if a.r.IntN(2) == 0 {
		sentences = append(sentences, fmt.Sprintf("{{Source|author=%s|title=%s|year=%d|page=%d}}",
			capital(a.words(2)), a.words(4), 1900+a.r.IntN(120), 1+a.r.IntN(400)))
	}
	return strings.Join(sentences, " ") + "\n"
}

// section writes a heading and one to three paragraphs. In half of the sections, a list, a table or
// a note follows.
func (a *author) section() {
	fmt.Fprintf(a, "\n== %s ==\n", capital(a.words(2)))
	for range 1 + a.r.IntN(3) {
		fmt.Fprintf(a, "%s\n", a.paragraph())
	}
	switch a.r.IntN(8) {
	case 0, 1:
		for range 3 + a.r.IntN(8) {
			fmt.Fprintf(a, "* [[%s]], %s\n", a.title(), a.words(6))
		}
	case 2:
		a.table()
	case 3:
		fmt.Fprintf(a, "{{Note|%s}}\n", a.sentence())
	}
}

func (a *author) table() {
	columns := 2 + a.r.IntN(4)
	a.WriteString("{| class=\"wikitable\"\n")
	for range columns {
		fmt.Fprintf(a, "! %s\n", a.words(1))
	}
	for range 3 + a.r.IntN(10) {
		a.WriteString("|-\n")
		for range columns {
			fmt.Fprintf(a, "| %s\n", a.words(2))
		}
	}
	a.WriteString("|}\n")
}
