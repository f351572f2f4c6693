// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"fmt"
	"maps"
	"sync"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// reusable is a data path that one test after the other uses. Between two tests all its maps are
// emptied. Most of the time of a test would otherwise be the verifier's work. Only the first process
// of an instance uses loaded objects again: a process that follows it loads its own.
type reusable struct {
	constants programConstants
	keys      agentAgentFlowKeys // further constants of the programs
	objects   *agentObjects      // nil before the first test has loaded them
	dry       *dryRun            // nil before a test has needed it
}

// programConstants are the settings on which the programs depend.
type programConstants struct {
	isInternal bool
	underlay   string
}

func constantsOf(node *desired.AgentNode) programConstants {
	return programConstants{node.IsInternal(), fmt.Sprint(node.Underlay)}
}

var (
	reuse sync.Mutex
	idle  = map[programConstants][]*reusable{}
	// used contains those that a test uses.
	used = map[*kernel]*reusable{}
)

func init() {
	datapath.LoadObjects = datapathtest.Reusing(datapath.LoadObjects, agentMapAgentFlowKeys)
}

// reuseFor makes the first process of the instance use a data path that an earlier test has loaded,
// if there is one. The test calls record when that process has loaded its data path. When the test
// has ended, and has removed the instance, other tests can use the data path.
func reuseFor(t testing.TB, node *desired.AgentNode) *reusable {
	t.Helper()
	reuse.Lock()
	defer reuse.Unlock()
	r := &reusable{constants: constantsOf(node)}
	if n := len(idle[r.constants]); n > 0 {
		r, idle[r.constants] = idle[r.constants][n-1], idle[r.constants][:n-1]
		testhost.Must(t, r.begin(node.Instance))
	}
	t.Cleanup(func() { r.end(t) })
	return r
}

// begin lets the first process of the instance use the data path.
func (r *reusable) begin(instance string) error {
	dir, err := datapath.MakeDir(instance, datapath.RoleAgent)
	if err != nil {
		return err
	}
	kept := datapath.MapsIn(&r.objects.agentMaps, declared.Names(datapath.Kept, datapath.Expendable)...)
	return datapathtest.Begin(dir, kept, agentMapAgentFlowKeys, r.objects)
}

// record keeps the objects that a test has loaded.
func (r *reusable) record(t testing.TB, k *kernel) {
	t.Helper()
	if r.objects == nil {
		kept := new(agentObjects)
		testhost.Must(t, datapathtest.CopyObjects(kept, &k.objects))
		r.objects, r.keys = kept, k.flowKeys
	}
	reuse.Lock()
	defer reuse.Unlock()
	used[k] = r
}

// end empties the data path for the next test. After a failed test nothing is known about it.
func (r *reusable) end(t testing.TB) {
	if r.objects == nil {
		return
	}
	reuse.Lock()
	maps.DeleteFunc(used, func(_ *kernel, other *reusable) bool { return other == r })
	reuse.Unlock()
	if t.Failed() {
		_ = r.objects.Close()
		if r.dry != nil {
			_ = r.dry.close()
		}
		return
	}
	err := errors.Join(datapathtest.Empty(r.objects), r.objects.AgentFlowKeys.Put(uint32(0), r.keys))
	if err != nil {
		t.Errorf("empty the data path for the next test: %v", err)
		return
	}
	reuse.Lock()
	defer reuse.Unlock()
	idle[r.constants] = append(idle[r.constants], r)
}

// A test that uses a data path again finds its maps as a load makes them.
func TestReusedDataPathIsEmpty(t *testing.T) {
	var first, second ebpf.ProgramID
	var objects *agentObjects
	t.Run("first test", func(t *testing.T) {
		k := testKernel(t)
		first = datapathtest.ProgramNumber(t, k.objects.XdpAgent)
		objects = used[k].objects
		for _, c := range append(deliveries(), drops()...) {
			runAgent(t, k, c.frame)
		}
		testhost.Must(t, k.objects.AgentFlowKeys.Put(uint32(0), agentAgentFlowKeys{}))
		if full := datapathtest.UsedMaps(t, objects, objects.AgentFlowKeys); len(full) < 6 {
			t.Errorf("the test uses only the maps %v", full)
		}
	})
	if full := datapathtest.UsedMaps(t, objects, objects.AgentFlowKeys); len(full) > 0 {
		t.Errorf("maps still have content: %v", full)
	}
	t.Run("second test", func(t *testing.T) {
		k := testKernel(t)
		if second = datapathtest.ProgramNumber(t, k.objects.XdpAgent); second != first {
			t.Errorf("the test runs program %d instead of %d", second, first)
		}
		if (k.flowKeys == agentAgentFlowKeys{}) {
			t.Error("the flow table has other keys than the programs")
		}
		next, err := openKernel(&desired.AgentNode{Instance: k.loader.Instance}, k.log)
		testhost.Must(t, err)
		defer next.close()
		if datapathtest.ProgramNumber(t, next.objects.XdpAgent) == first {
			t.Error("the second process has not loaded its own program")
		}
	})
}

// Content that a load gives to a map would get lost when the map is emptied.
func TestLoadsBeginEmpty(t *testing.T) {
	t.Parallel()
	objects := new(agentObjects)
	spec, _, err := loadPermitted()
	testhost.Must(t, err)
	testhost.Must(t, spec.LoadAndAssign(objects, nil))
	defer objects.Close()
	if full := datapathtest.UsedMaps(t, objects, nil); len(full) > 0 {
		t.Errorf("maps have content: %v", full)
	}
}
