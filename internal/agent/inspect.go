package agent

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// Inspect reads the state of an agent's data path, whether its process runs or not.
func Inspect(instance string) (*datapath.Snapshot, error) {
	spec, names, err := loadSpec()
	if err != nil {
		return nil, err
	}
	pin := filepath.Join(datapath.Dir(instance), agentMapReasons)
	reasons, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", pin, err)
	}
	defer reasons.Close()
	if err := datapath.Compatible(spec.Maps[agentMapReasons], reasons); err != nil {
		return nil, fmt.Errorf("%s is of another build of segue: %w", pin, err)
	}
	counts, err := datapath.CountReasons(reasons, names)
	if err != nil {
		return nil, fmt.Errorf("instance %s: %w", instance, err)
	}
	return datapath.Inspect(datapath.Instance{Name: instance, Role: datapath.RoleAgent}, agentProgXdpAgent, counts)
}
