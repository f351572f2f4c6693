// SPDX-License-Identifier: Apache-2.0

package wiki_test

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"maps"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab/wiki"
	"github.com/segue-lb/segue/research/sim"
)

// export is MediaWiki's export format.
type export struct {
	XMLName xml.Name `xml:"http://www.mediawiki.org/xml/export-0.11/ mediawiki"`
	Pages   []struct {
		Title     string `xml:"title"`
		Namespace int    `xml:"ns"`
		Text      string `xml:"revision>text"`
	} `xml:"page"`
}

func dump(t *testing.T, w *wiki.Wiki) []byte {
	t.Helper()
	var text bytes.Buffer
	testhost.Must(t, w.Dump(&text))
	return text.Bytes()
}

var (
	link = regexp.MustCompile(`\[\[([^]|]+)`)
	use  = regexp.MustCompile(`\{\{([^}|]+)`)
)

// TestDump reads a dump as XML. Its links lead to pages of the wiki, its templates exist, and its
// sizes are distributed as documented.
func TestDump(t *testing.T) {
	const pages = 2000
	w := wiki.New(pages, 1)
	var read export
	testhost.Must(t, xml.Unmarshal(dump(t, w), &read))
	titles, templates, sizes := []string{}, map[string]bool{}, []int{}
	for _, page := range read.Pages {
		if page.Namespace == 10 {
			templates[strings.TrimPrefix(page.Title, "Template:")] = true
			continue
		}
		titles = append(titles, page.Title)
		sizes = append(sizes, len(page.Text))
	}
	if !slices.Equal(titles, w.Titles()) || len(titles) != pages {
		t.Fatalf("the dump has %d pages, want the %d of the wiki", len(titles), pages)
	}
	known := map[string]bool{}
	for _, title := range titles {
		known[title] = true
	}
	if len(known) != pages {
		t.Errorf("%d titles are not distinct", pages-len(known))
	}
	links, uses := 0, 0
	for _, page := range read.Pages[len(templates):] {
		for _, match := range link.FindAllStringSubmatch(page.Text, -1) {
			links++
			if target := match[1]; !known[target] && !strings.HasPrefix(target, "Category:") {
				t.Errorf("%s links to %q, which does not exist", page.Title, target)
			}
		}
		for _, match := range use.FindAllStringSubmatch(page.Text, -1) {
			uses++
			if !templates[match[1]] {
				t.Errorf("%s uses the template %q, which does not exist", page.Title, match[1])
			}
		}
	}
	if links < pages || uses < pages {
		t.Errorf("%d links and %d uses of templates are too few for %d pages", links, uses, pages)
	}
	slices.Sort(sizes)
	// Pages end with a section, so that the median is a little above 3 kB.
	if median := sizes[pages/2]; median < 2700 || median > 4500 {
		t.Errorf("the median size is %d bytes", median)
	}
	if sizes[pages/100] < 200 || sizes[pages-1] < 20_000 || sizes[pages-1] > 70_000 {
		t.Errorf("sizes are from %d to %d bytes", sizes[0], sizes[pages-1])
	}
}

// TestSeeds generates the same wiki twice, and another one with another seed.
func TestSeeds(t *testing.T) {
	first := dump(t, wiki.New(50, 7))
	if !bytes.Equal(first, dump(t, wiki.New(50, 7))) {
		t.Error("the same seed generates two different wikis")
	}
	if bytes.Equal(first, dump(t, wiki.New(50, 8))) {
		t.Error("two seeds generate the same wiki")
	}
}

// TestQueries writes a day of requests. They are for pages of the wiki and for static files, follow
// the curve, and are more frequent for popular pages.
func TestQueries(t *testing.T) {
	const rate, seconds, static = 100.0, 200.0, 0.25
	w := wiki.New(100, 3)
	day := sim.Diurnal{Period: seconds, Amplitude: 0.5}
	q := wiki.Queries{
		Arrivals: sim.Poisson{Rate: rate, Curve: day}, Duration: seconds * time.Second,
		Static: static, Seed: 5,
	}
	write := func(q wiki.Queries) string {
		var text strings.Builder
		testhost.Must(t, w.WriteQueries(&text, q))
		return text.String()
	}
	text := write(q)
	if text != write(q) {
		t.Error("the same seed writes two different days")
	}
	q.Seed++
	if text == write(q) {
		t.Error("two seeds write the same day")
	}
	titles := map[string]int{}
	for rank, title := range w.Titles() {
		titles[strings.ReplaceAll(title, " ", "_")] = rank
	}
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	if lines[0] != "time\tquery" {
		t.Errorf("the header is %q", lines[0])
	}
	visits, halves, files, last := map[int]int{}, [2]int{}, 0, 0.0
	for _, line := range lines[1:] {
		at, query, _ := strings.Cut(line, "\t")
		time, err := strconv.ParseFloat(at, 64)
		if err != nil || time < last || time >= seconds {
			t.Fatalf("%q: the time is not between %v and %v", line, last, seconds)
		}
		last = time
		halves[int(2*time/seconds)]++
		target, err := url.ParseRequestURI(query)
		testhost.Must(t, err)
		title, isPage := strings.CutPrefix(target.Path, "/wiki/index.php/")
		rank, known := titles[title]
		switch {
		case !isPage && strings.HasPrefix(target.Path, "/wiki/resources/"):
			files++
		case isPage && known:
			visits[rank]++
		default:
			t.Errorf("%q is neither a page nor a file", query)
		}
	}
	total := float64(len(lines) - 1)
	// Six standard deviations of each count, which is about 140 at 20,000 requests.
	near := func(what string, got int, want float64) {
		if math.Abs(float64(got)-want) > 6*math.Sqrt(want) {
			t.Errorf("%s: %d, want %.0f", what, got, want)
		}
	}
	near("requests", int(total), rate*seconds)
	near("static files", files, static*total)
	near("requests in the busy half", halves[0], rate*seconds*(0.5+0.5/math.Pi))
	weights := 0.0
	for rank := range 100 {
		weights += math.Pow(float64(rank+1), -0.8)
	}
	for _, rank := range []int{0, 1, 9, 99} {
		near("visits", visits[rank], (1-static)*total*math.Pow(float64(rank+1), -0.8)/weights)
	}
	if len(visits) != 100 {
		t.Errorf("pages without a visit: %v", slices.Sorted(maps.Keys(visits)))
	}
}

// WritePages requests each page once.
func TestPages(t *testing.T) {
	w := wiki.New(7, 1)
	var out strings.Builder
	testhost.Must(t, w.WritePages(&out, 2))
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	seen := map[string]bool{}
	for i, line := range lines[1:] {
		at, query, _ := strings.Cut(line, "\t")
		if want := fmt.Sprintf("%.6f", float64(i)/2); at != want {
			t.Errorf("request %d is at %s, want %s", i, at, want)
		}
		seen[query] = true
		if !strings.HasPrefix(query, wiki.Path+"/index.php/") {
			t.Errorf("request %d is for %q, which is no page", i, query)
		}
	}
	if len(lines) != 8 || len(seen) != 7 {
		t.Errorf("%d lines with %d pages, want 8 with 7:\n%s", len(lines), len(seen), &out)
	}
}
