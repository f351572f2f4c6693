// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// reusable is a data path that one test after the other uses. Between two tests all its maps are
// emptied. Most of the time of a test would otherwise be the verifier's work on xdp_lb. Only the
// first process of an instance uses loaded objects again: a process that follows it loads its own.
type reusable struct {
	constants constants
	objects   *dataplane.Objects // nil before the first test has loaded them
	identity  dataplane.Identity // with the hash keys that are constants of the programs
}

// constants are the settings on which the programs and the sizes of the maps depend.
type constants struct {
	limits     desired.Limits
	seed       uint64
	isInternal bool
	shift      uint32
	jiffy      time.Duration
	features   dataplane.Features
	underlay   string
}

// narrowed are the instances whose programs have only the features that their services need. All
// others have all features, so that tests of different services use the same programs.
var narrowed sync.Map

var (
	reuse sync.Mutex
	idle  = map[constants][]*reusable{}
)

func init() {
	needed := dataplane.FeaturesOf
	dataplane.FeaturesOf = func(cfg *desired.Balancer) dataplane.Features {
		if _, is := narrowed.Load(cfg.Node.Instance); is {
			return needed(cfg)
		}
		return dataplane.FeaturesAll
	}
	datapath.LoadObjects = datapathtest.Reusing(datapath.LoadObjects, identityMap)
}

const identityMap = "identity"

// reusableFor returns a data path for the configuration, and pins its maps for the instance. When
// the test has ended, and has removed the instance, other tests can use the data path.
func reusableFor(t testing.TB, cfg *desired.Balancer, clock *dataplane.FlowClock) *reusable {
	t.Helper()
	key := constants{cfg.Node.Limits, cfg.Node.Seed, cfg.Node.IsInternal(), clock.Shift, clock.Jiffy, dataplane.FeaturesOf(cfg), fmt.Sprint(cfg.Node.Underlay)}
	reuse.Lock()
	defer reuse.Unlock()
	r := &reusable{constants: key}
	if n := len(idle[key]); n > 0 {
		r, idle[key] = idle[key][n-1], idle[key][:n-1]
		testhost.Must(t, r.begin(cfg.Node.Instance))
	}
	t.Cleanup(func() { r.end(t) })
	return r
}

// begin lets the first process of the instance use the data path.
func (r *reusable) begin(instance string) error {
	dir, err := datapath.MakeDir(instance, datapath.RoleBalancer)
	if err != nil {
		return err
	}
	return datapathtest.Begin(dir, r.objects.Pinned(), identityMap, r.objects)
}

// record keeps the objects that a test has loaded.
func (r *reusable) record(t testing.TB, objects *dataplane.Objects) {
	t.Helper()
	if r.objects != nil {
		return
	}
	kept := new(dataplane.Objects)
	testhost.Must(t, datapathtest.CopyObjects(kept, objects))
	testhost.Must(t, kept.Identity.Lookup(uint32(0), &r.identity))
	r.objects = kept
}

// end empties the data path for the next test. After a failed test nothing is known about it.
func (r *reusable) end(t testing.TB) {
	if r.objects == nil {
		return
	}
	if t.Failed() {
		_ = r.objects.Close()
		return
	}
	if err := errors.Join(datapathtest.Empty(r.objects), r.objects.Identity.Put(uint32(0), r.identity)); err != nil {
		t.Errorf("empty the data path for the next test: %v", err)
		return
	}
	reuse.Lock()
	defer reuse.Unlock()
	idle[r.constants] = append(idle[r.constants], r)
}

// A test that uses a data path again finds its maps as a load makes them.
func TestReusedDataPathIsEmpty(t *testing.T) {
	t.Parallel()
	cfg := standard()
	cfg.Node.Seed = 77 // no other test uses this data path
	var r *reusable
	var identity dataplane.Identity
	t.Run("first test", func(t *testing.T) {
		f := openWith(t, cfg, stoppedClock(t), false)
		identity = f.identity
		f.run(frameOf(web))
		f.must(f.plane.Objects.Identity.Put(uint32(0), dataplane.Identity{Version: identity.Version}))
		f.setAnswered(1)
		f.must(f.sweep())
		used := datapathtest.UsedMaps(t, &f.plane.Objects, f.plane.Objects.Identity)
		if len(used) < 8 {
			t.Errorf("the test uses only the maps %v", used)
		}
	})
	for key, all := range idleNow() {
		if key.seed == cfg.Node.Seed {
			r = all[0]
		}
	}
	if r == nil {
		t.Fatal("the data path of the first test cannot be used again")
	}
	if used := datapathtest.UsedMaps(t, r.objects, r.objects.Identity); len(used) > 0 {
		t.Errorf("maps still have content: %v", used)
	}
	t.Run("second test", func(t *testing.T) {
		f := openWith(t, cfg, stoppedClock(t), false)
		if got, want := datapathtest.ProgramNumber(t, f.plane.Objects.XdpLb), datapathtest.ProgramNumber(t, r.objects.XdpLb); got != want {
			t.Errorf("the test runs program %d instead of %d", got, want)
		}
		if f.identity != identity {
			t.Errorf("the identity is %+v, and %+v in the programs", f.identity, identity)
		}
		f.stop()
		f.start(cfg)
		if got, other := datapathtest.ProgramNumber(t, f.plane.Objects.XdpLb), datapathtest.ProgramNumber(t, r.objects.XdpLb); got == other {
			t.Errorf("the second process has not loaded its own program")
		}
	})
}

// Content that a load gives to a map would get lost when the map is emptied.
func TestLoadsBeginEmpty(t *testing.T) {
	t.Parallel()
	objects := new(dataplane.Objects)
	spec, _, err := dataplane.LoadSpec()
	testhost.Must(t, err)
	testhost.Must(t, spec.LoadAndAssign(objects, nil))
	defer objects.Close()
	if used := datapathtest.UsedMaps(t, objects, objects.Identity); len(used) > 0 {
		t.Errorf("maps have content: %v", used)
	}
}

func idleNow() map[constants][]*reusable {
	reuse.Lock()
	defer reuse.Unlock()
	return maps.Clone(idle)
}
