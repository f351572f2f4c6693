// SPDX-License-Identifier: Apache-2.0

// Package wiki generates a wiki for experiments: its pages, as a dump that MediaWiki can import,
// and a day of requests for these pages. Everything follows from a seed, and nothing comes from a
// real wiki. Words, titles and links are random. Sizes and popularities follow the distributions
// below.
package wiki

import (
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"strings"
)

// Version is the version of the generator. It must grow when the same seed generates another wiki.
const Version = 1

// MaxPages is the largest number of pages.
const MaxPages = 100_000

// The size of a page's text has a log-normal distribution, with a mean of 5.5 kB.
const (
	medianSize = 3000   // in bytes
	deviation  = 1.1    // the standard deviation of the size's natural logarithm
	leastSize  = 300    // a smaller size that is drawn becomes this one
	mostSize   = 60_000 // a larger size that is drawn becomes this one
)

// The rank of a word or page is its place in the order of popularity. By Zipf's law, rank k is
// drawn with a probability that is proportional to 1/k^exponent.
const (
	wordExponent = 1.0
	pageExponent = 0.8
)

const (
	vocabulary = 8000 // words
	categories = 100
)

// Wiki is a generated wiki.
type Wiki struct {
	seed   uint64
	words  []string // by rank: the most popular one first
	titles []string // of the pages, by rank
	word   zipf     // of the ranks of words
	page   zipf     // of the ranks of pages
}

// The streams of random numbers of a seed. The text of page i has the stream streamPages + i.
const (
	streamWords = iota
	streamTitles
	streamQueries
	streamPages
)

// New generates the words and titles of a wiki. The number of pages is from 1 to MaxPages.
func New(pages int, seed uint64) *Wiki {
	w := &Wiki{seed: seed, word: newZipf(vocabulary, wordExponent), page: newZipf(pages, pageExponent)}
	w.words = distinct(vocabulary, w.random(streamWords), newWord)
	w.titles = distinct(pages, w.random(streamTitles), func(r *rand.Rand) string {
		words := make([]string, 1+r.IntN(3))
		for i := range words {
			words[i] = w.words[r.IntN(len(w.words))]
		}
		return capital(strings.Join(words, " "))
	})
	return w
}

// random returns the generator of a stream of random numbers.
func (w *Wiki) random(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(w.seed, stream)) }

// Titles returns the titles of all pages, from the most popular page to the least popular one.
func (w *Wiki) Titles() []string { return slices.Clone(w.titles) }

// distinct generates n different texts.
func distinct(n int, r *rand.Rand, generate func(*rand.Rand) string) []string {
	texts := make([]string, 0, n)
	seen := make(map[string]bool, n)
	for len(texts) < n {
		if text := generate(r); !seen[text] {
			seen[text] = true
			texts = append(texts, text)
		}
	}
	return texts
}

// newWord returns a word of one to four syllables.
func newWord(r *rand.Rand) string {
	const consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
	var word strings.Builder
	for range 1 + r.IntN(4) {
		word.WriteByte(consonants[r.IntN(len(consonants))])
		word.WriteByte(vowels[r.IntN(len(vowels))])
	}
	if r.IntN(2) == 0 {
		word.WriteByte(consonants[r.IntN(len(consonants))])
	}
	return word.String()
}

// capital changes the first letter of a text to upper case.
func capital(text string) string { return strings.ToUpper(text[:1]) + text[1:] }

// size draws the size of a page in bytes.
func size(r *rand.Rand) int {
	drawn := medianSize * math.Exp(deviation*r.NormFloat64())
	return int(min(max(drawn, leastSize), mostSize))
}

// zipf draws ranks by Zipf's law. Ranks count from 0 here, and rank 0 is the most popular one.
// Element k of a zipf is the sum of the weights of the ranks 0 to k. (The Zipf of math/rand needs
// an exponent above 1.)
type zipf []float64

// newZipf returns the distribution of n ranks.
func newZipf(n int, exponent float64) zipf {
	z := make(zipf, n)
	sum := 0.0
	for k := range z {
		sum += math.Pow(float64(k+1), -exponent)
		z[k] = sum
	}
	return z
}

// draw draws a rank: the first one whose sum of weights is at least a random share of the whole
// sum.
func (z zipf) draw(r *rand.Rand) int {
	return sort.SearchFloat64s(z, r.Float64()*z[len(z)-1])
}
