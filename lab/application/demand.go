// SPDX-License-Identifier: Apache-2.0

package application

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/segue-lb/segue/research/sim"
)

// Demand decides how much work a request brings, unless the request itself says so.
type Demand struct {
	// Table has the work of queries. It may be nil.
	Table *Table
	// Drawn is the distribution, in seconds, of the work of requests that Table does not have. If
	// only Drawn is nil, such requests are errors. If both are nil, requests bring no work.
	Drawn *sim.Distribution
	// Seed is the seed of the numbers that are drawn from Drawn.
	Seed uint64
}

// MaxWork is the most work that a request may bring.
const MaxWork = time.Hour

// drawer decides the work of requests. Several goroutines may use it at the same time.
type drawer struct {
	Demand
	mu     sync.Mutex
	random *rand.PCG
}

// newDrawer returns a drawer whose random numbers depend on the seed and the server's name. So
// servers with the same seed draw different numbers.
func newDrawer(d Demand, server string) *drawer {
	const basis, prime = 14695981039346656037, 1099511628211 // of the hash FNV-1a
	name := uint64(basis)
	for i := range len(server) {
		name = (name ^ uint64(server[i])) * prime
	}
	return &drawer{Demand: d, random: rand.NewPCG(d.Seed, name)}
}

// errUnknownQuery is the error for a request that the table of demands does not have.
var errUnknownQuery = errors.New("the table of demands does not have this query")

// work returns the work of a request, in seconds of a core of speed 1. If the request names its
// work, as in /?work=190ms, that is the result. Otherwise the table has the work. If there is no
// table, or it does not have the query, the work is drawn. If there is no distribution either, an
// unknown query is an error, and without a table the work is 0.
func (d *drawer) work(r *http.Request) (float64, error) {
	if strings.Contains(r.URL.RawQuery, "work=") { // otherwise the query need not be parsed
		if text, given := r.URL.Query()["work"]; given {
			return parseWork(text[0])
		}
	}
	if d.Table != nil {
		if seconds, known := d.Table.Work(r.RequestURI); known {
			return seconds, nil
		}
	}
	switch {
	case d.Drawn != nil:
		d.mu.Lock()
		defer d.mu.Unlock()
		return d.Drawn.Sample(d.random.Uint64()), nil
	case d.Table != nil:
		return 0, errUnknownQuery
	}
	return 0, nil
}

// parseWork reads a duration from 0 to MaxWork and returns it in seconds.
func parseWork(text string) (float64, error) {
	work, err := time.ParseDuration(text)
	if err != nil || work < 0 || work > MaxWork {
		return 0, fmt.Errorf("work %q: must be a duration from 0s to %v, such as 190ms", text, MaxWork)
	}
	return work.Seconds(), nil
}

// Table has the work of queries. Each server of a lab has a copy of the table. So the table stores
// a hash of each query instead of the query, and needs only 16 bytes for each.
type Table struct {
	seed    maphash.Seed
	queries []hashedQuery // in ascending order of hashes
}

// hashedQuery is a query, by its hash of 64 bits, and its work in seconds.
type hashedQuery struct {
	hash uint64
	work float64
}

// LoadTable reads a file of lines "query<TAB>work". A query is the target of a request: path and
// query string, such as /index.php?title=Segue. The work is a duration from 0s to MaxWork, such as
// 190ms. If the second field of the first line has no digit, LoadTable skips this line as a header.
func LoadTable(path string) (*Table, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	t, err := readTable(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// readTable reads a table in the form that LoadTable describes.
func readTable(text io.Reader) (*Table, error) {
	t := &Table{seed: maphash.MakeSeed()}
	scanner := bufio.NewScanner(text)
	scanner.Buffer(nil, 1<<20)
	number := 0
	for scanner.Scan() {
		number++
		query, work, ok := strings.Cut(scanner.Text(), "\t")
		isHeader := number == 1 && ok && !strings.ContainsAny(work, "0123456789")
		if isHeader {
			continue
		}
		if !ok || !strings.HasPrefix(query, "/") {
			return nil, fmt.Errorf("line %d: %.200q: must be query<TAB>work, "+
				"with a query that begins with /", number, scanner.Text())
		}
		seconds, err := parseWork(work)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		t.queries = append(t.queries, hashedQuery{maphash.String(t.seed, query), seconds})
	}
	if err := scanner.Err(); err != nil {
		return nil, fmt.Errorf("line %d: %w", number+1, err)
	}
	return t, t.sort()
}

// sort sorts the table by hashes and removes repetitions. It returns an error if the same query
// occurs with different works.
func (t *Table) sort() error {
	slices.SortStableFunc(t.queries, func(a, b hashedQuery) int { return cmp.Compare(a.hash, b.hash) })
	for i := 1; i < len(t.queries); i++ {
		if a, b := t.queries[i-1], t.queries[i]; a.hash == b.hash && a.work != b.work {
			return fmt.Errorf("a query has two different works, %v and %v",
				seconds(a.work), seconds(b.work))
		}
	}
	t.queries = slices.Clip(slices.Compact(t.queries))
	return nil
}

// Work returns the work of a query in seconds, and whether the table has the query.
func (t *Table) Work(query string) (seconds float64, known bool) {
	hash := maphash.String(t.seed, query)
	i, known := slices.BinarySearchFunc(t.queries, hash, func(q hashedQuery, hash uint64) int {
		return cmp.Compare(q.hash, hash)
	})
	if !known {
		return 0, false
	}
	return t.queries[i].work, true
}

// seconds converts a number of seconds to a duration.
func seconds(s float64) time.Duration {
	return time.Duration(math.Round(s * float64(time.Second)))
}
