// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"errors"
	"testing"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

// FuzzParseTopology reads any bytes as the topology in a lab's state. An accepted one can be written
// and read again, as a lab does. Each error is about a field, or about the whole file.
func FuzzParseTopology(f *testing.F) {
	f.Add([]byte("balancers: 2\nservers: 4\nclients: 1\n"))
	f.Add([]byte("servers: {count: 3, application: echo}\nlinks: [{from: lb1, to: s1, loss: 0.1}]\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		topology, err := ParseTopology(text)
		if err != nil {
			if problems := (fieldpath.Errors{}); !errors.As(err, &problems) {
				t.Fatalf("error of type %T: %v", err, err)
			}
			return
		}
		written, err := yaml.Dump(topology)
		testhost.Must(t, err)
		if _, err := ParseTopology(written); err != nil {
			t.Fatalf("%s\nis not valid when written:\n%s\n%v", text, written, err)
		}
	})
}
