// SPDX-License-Identifier: Apache-2.0

package wiki

import (
	"bufio"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/segue-lb/segue/research/sim"
)

// Path is the path in URLs at which the servers of the lab have MediaWiki.
const Path = "/wiki"

// pagePath is the path of a page in URLs, without the page's title. It has the same form as in the
// papers (6LB, section VI-C3; SRLB, section VI-C).
const pagePath = Path + "/index.php/"

// files are static files of MediaWiki that a browser loads with a page.
var files = []string{
	Path + "/resources/assets/change-your-logo.svg",
	Path + "/resources/assets/poweredby_mediawiki_88x31.png",
	Path + "/resources/assets/licenses/cc-by-sa.png",
	Path + "/resources/assets/licenses/public-domain.png",
}

// Queries describes requests for a wiki.
type Queries struct {
	// Arrivals are the times of the requests.
	Arrivals sim.Arrivals
	// Duration is the time in which the requests arrive.
	Duration time.Duration
	// Static is the share of requests for static files, from 0 to 1. The other requests draw pages
	// by their popularity.
	Static float64
	// Seed is the seed of the arrivals and the pages.
	Seed uint64
}

// WriteQueries writes the requests as a trace: a header, and a line for each request with its time
// in seconds and its path. The trace ends at q.Duration, or earlier if the arrivals end earlier.
func (w *Wiki) WriteQueries(out io.Writer, q Queries) error {
	arrivals, err := q.Arrivals.Start(sim.NewRand(q.Seed, 0))
	if err != nil {
		return err
	}
	defer arrivals.Close()
	r := (&Wiki{seed: q.Seed}).random(streamQueries) // depends on q.Seed, and not on the wiki's seed
	b := bufio.NewWriter(out)
	fmt.Fprintln(b, "time\tquery")
	for {
		next, ok := arrivals.Next()
		if !ok || next.At >= q.Duration.Seconds() {
			return b.Flush()
		}
		query := ""
		if r.Float64() < q.Static {
			query = files[r.IntN(len(files))]
		} else {
			query = w.query(w.page.draw(r))
		}
		fmt.Fprintf(b, "%.6f\t%s\n", next.At, query)
	}
}

// WritePages writes a trace with one request for each page, at equal intervals. rate is the number
// of requests per second.
func (w *Wiki) WritePages(out io.Writer, rate float64) error {
	b := bufio.NewWriter(out)
	fmt.Fprintln(b, "time\tquery")
	for page := range w.titles {
		fmt.Fprintf(b, "%.6f\t%s\n", float64(page)/rate, w.query(page))
	}
	return b.Flush()
}

// query returns the path of the page with the given rank.
func (w *Wiki) query(page int) string {
	return pagePath + strings.ReplaceAll(w.titles[page], " ", "_")
}
