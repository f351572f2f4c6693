// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// announcer fails to follow each plan, and counts the plans.
type announcer struct{ plans int }

func (a *announcer) apply(context.Context, *desired.Balancer, desired.Secrets) error {
	a.plans++
	return errors.New("no such peer")
}

// TestAnnouncerThatCannotFollow checks that a change succeeds if the data path follows it and the
// announcer does not. An error would say that nothing has changed, which would be false.
func TestAnnouncerThatCannotFollow(t *testing.T) {
	t.Parallel()
	f, failing := &follower[*desired.Balancer]{}, &announcer{}
	var log bytes.Buffer
	a := &announced{f, failing, slog.New(slog.NewTextHandler(&log, nil))}
	cfg := &desired.Balancer{BGP: &desired.BGP{}}
	if err := a.Reload(t.Context(), cfg, desired.Secrets{}); err != nil || f.state != cfg || failing.plans != 1 {
		t.Errorf("error %v, the data path follows %p, want %p; %d plans", err, f.state, cfg, failing.plans)
	}
	if want := "the announcement of vips does not follow the configuration"; !strings.Contains(log.String(), want) {
		t.Errorf("no %q in %s", want, &log)
	}
}
