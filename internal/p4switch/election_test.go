// SPDX-License-Identifier: Apache-2.0

package p4switch_test

import (
	"fmt"
	"testing"

	"github.com/segue-lb/segue/internal/p4switch"
	"github.com/segue-lb/segue/internal/p4switch/switchtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// On the software switch, too, a controller with a lower election ID waits until the other one has
// gone, and then takes over.
func TestElection(t *testing.T) {
	sw := switchtest.Start(t)
	to := sw.To
	to.ElectionID = 10
	first, err := p4switch.Dial(t.Context(), &to)
	testhost.Must(t, err)
	to.ElectionID = 5
	waits, err := p4switch.Dial(t.Context(), &to)
	testhost.Must(t, err)
	if !first.IsPrimary() || waits.IsPrimary() {
		t.Errorf("10 is primary: %t, 5 is primary: %t", first.IsPrimary(), waits.IsPrimary())
	}
	testhost.Must(t, waits.Close())
	testhost.Must(t, first.Close())
	testhost.Eventually(t, func() error {
		second, err := p4switch.Dial(t.Context(), &to)
		if err != nil {
			return err
		}
		defer second.Close()
		if !second.IsPrimary() {
			return fmt.Errorf("5 is not primary")
		}
		return nil
	})
}
