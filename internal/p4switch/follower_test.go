// SPDX-License-Identifier: Apache-2.0

package p4switch

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// patience is how long a test waits for a follower.
const patience = time.Minute

// follow runs a follower of a switch until the test ends.
func follow(t *testing.T, f *fake, election uint64) chan<- *Content {
	t.Helper()
	_, contents, _ := startFollower(t, f, election)
	return contents
}

func startFollower(t *testing.T, f *fake, election uint64) (follower *Follower, to chan<- *Content, stop func()) {
	t.Helper()
	contents := make(chan *Content)
	follower, stop = runFollower(t, f, election, contents)
	return follower, contents, stop
}

func runFollower(t *testing.T, f *fake, election uint64, contents <-chan *Content) (follower *Follower, stop func()) {
	t.Helper()
	at := &desired.Switch{Address: f.address, ElectionID: election, NetworkPort: 1, HostPort: 2}
	follower = NewFollower(at, slog.New(slog.DiscardHandler))
	follower.retry, follower.patience = 10*time.Millisecond, patience
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- follower.Run(ctx, contents) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(stop)
	return follower, stop
}

// await waits until the switch has the content of which this is the view.
func (f *fake) await(what string, view map[string]string) {
	f.t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		has := maps.Equal(f.view(), view)
		f.mu.Unlock()
		if has {
			return
		}
		if time.Now().After(deadline) {
			f.t.Fatalf("%s: the switch does not have the content", what)
		}
	}
}

// A follower brings the last content to a switch that starts late, has lost its entries, or has
// refused some.
func TestFollower(t *testing.T) {
	f := startFake(t)
	f.stop()
	contents := follow(t, f, 1)
	first, second := contentOf(t, []uint16{1, 2, 3}), contentOf(t, []uint16{1, 2, 3, 4}, []uint16{1, 2, 3})
	isFirst, isSecond := viewOf(first), viewOf(second) // the follower owns what it gets
	f.start()
	contents <- first
	f.await("a switch that starts late", isFirst)
	f.stop()
	f.config, f.tables = nil, map[string]string{}
	f.start()
	f.await("a switch without its entries", isFirst)
	f.mu.Lock()
	f.most = f.writes + 20
	f.mu.Unlock()
	contents <- second
	f.mu.Lock()
	f.most = -1
	f.mu.Unlock()
	f.await("a switch that has refused entries", isSecond)
}

// A switch that has been away gets the latest content, and no former one.
func TestFollowerSkipsFormerContents(t *testing.T) {
	f := startFake(t)
	contents := make(chan *Content, 1) // as that of the balancer
	follower, _ := runFollower(t, f, 1, contents)
	contents <- contentOf(t, []uint16{1, 2, 3})
	awaitState(t, follower, "a new switch", follows)
	f.stop()
	awaitState(t, follower, "no switch", hasProblem("connect"))
	f.config, f.tables = nil, map[string]string{}
	wasFormer := false
	f.changed = func() {
		_, has := f.tables["next_hops "+pack(Number(1))]
		wasFormer = wasFormer || has
	}
	second := contentOf(t, []uint16{4, 5})
	isSecond := viewOf(second)
	contents <- second
	f.start()
	f.await("a switch that is back", isSecond)
	f.mu.Lock()
	defer f.mu.Unlock()
	if wasFormer {
		t.Error("the switch had a server of the former content")
	}
}

// Before there is a content, a switch without entries gets those of its ports. A switch with entries
// keeps them.
func TestPassAll(t *testing.T) {
	f := startFake(t)
	follow(t, f, 1)
	testhost.Eventually(t, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.tables) != 2 {
			return fmt.Errorf("%d entries, want those of two ports", len(f.tables))
		}
		return nil
	})
	s := f.open(2)
	testhost.Must(t, s.PassAll(t.Context(), 3, 4))
	if f.writes != 2 {
		t.Errorf("a switch that has ports was changed")
	}
}

// A controller with a lower election ID waits until the other one has gone.
func TestFollowerWaits(t *testing.T) {
	f := startFake(t)
	first := contentOf(t, []uint16{1, 2, 3})
	isFirst := viewOf(first)
	_, primary, stop := startFollower(t, f, 7)
	primary <- first
	f.await("the primary controller", isFirst)
	contents := follow(t, f, 6)
	select {
	case contents <- contentOf(t, []uint16{4, 5}):
		t.Fatal("the other controller took a content")
	case <-time.After(200 * time.Millisecond):
	}
	stop()
	second := contentOf(t, []uint16{1, 2, 3, 4}, []uint16{1, 2, 3})
	isSecond := viewOf(second)
	contents <- second
	f.await("the other controller", isSecond)
}

// While a change is written, the switch does not follow.
func TestFollowerTellsChanges(t *testing.T) {
	f := startFake(t)
	follower, contents, _ := startFollower(t, f, 1)
	first, second := contentOf(t, []uint16{1, 2, 3}), contentOf(t, []uint16{1, 2, 3, 4}, []uint16{1, 2, 3})
	isSecond := viewOf(second)
	contents <- first
	state := func() Status {
		follower.mu.Lock()
		defer follower.mu.Unlock()
		return follower.state
	}
	follows := func() error {
		if s := state(); !s.Follows {
			return errors.New(s.Problem)
		}
		return nil
	}
	testhost.Eventually(t, follows)
	updates, early := 0, 0
	f.mu.Lock()
	f.changed = func() {
		updates++
		if s := state(); s.Follows || s.Problem != incomplete {
			early++
		}
	}
	f.mu.Unlock()
	contents <- second
	f.await("the change", isSecond)
	testhost.Eventually(t, follows)
	f.mu.Lock()
	defer f.mu.Unlock()
	if updates == 0 || early > 0 {
		t.Errorf("the switch follows after %d of %d updates", early, updates)
	}
}

// A switch that never says who is primary counts as lost, so the follower connects again.
func TestDialGivesUpOnSilentSwitch(t *testing.T) {
	t.Parallel()
	f := startFake(t)
	f.silent = true
	_, err := Dial(t.Context(), &desired.Switch{Address: f.address, ElectionID: 1})
	if !errors.Is(err, errSilent) {
		t.Errorf("the error is %v", err)
	}
}
