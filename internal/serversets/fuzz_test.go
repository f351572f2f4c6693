// SPDX-License-Identifier: Apache-2.0

package serversets

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/testhost"
)

// FuzzFile reads any bytes as a file of generations. An accepted file stays the same when it is
// written and read again, and its sets have tables.
func FuzzFile(f *testing.F) {
	set := Set{Placement: "hash", Buckets: 17, Candidates: 3, Servers: []Server{{"a", 1}, {"b", 1000}}}
	turns := Set{Placement: "round-robin", Buckets: 251, Candidates: 8, Servers: []Server{{"a", 3}, {"c", 5}}}
	empty := Set{Placement: "hunt", Buckets: 2, Candidates: 1, Servers: []Server{}}
	text, err := json.Marshal(document{format, Generations{"web": {3, []Set{set, turns, empty}}, "dns": {}}})
	testhost.Must(f, err)
	f.Add(text)
	f.Add([]byte(`{"format":1}`))
	f.Add([]byte(`{"format":1,"services":{"web":{"number":1,"sets":[{"placement":"hash","buckets":17,"candidates":1,"servers":[{"name":"a","weight":4294967295}]}]}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		all, err := parse(text)
		if err != nil {
			return
		}
		again, err := json.Marshal(document{format, all})
		testhost.Must(t, err)
		if back, err := parse(again); err != nil || !cmp.Equal(all, back) {
			t.Fatalf("%s\nbecomes %v: %v", again, back, err)
		}
		for _, g := range all {
			for _, set := range g.Sets {
				if set.Buckets > 1000 || len(set.Servers) > 100 { // takes long
					continue
				}
				if _, err := set.Table(); err != nil && len(set.Servers) < set.Buckets {
					t.Errorf("%+v: %v", set, err)
				}
			}
		}
	})
}
