package bench
import ("testing";"fmt";"os";"time";"strings";"github.com/cilium/ebpf")
func TestZZ(t *testing.T){
 spec,err:=ebpf.LoadCollectionSpec(os.Getenv("OBJ")); if err!=nil{t.Fatal(err)}
 for nm,m:=range spec.Maps{ if nm==".data.directory" {m.ValueSize=64+4096+(4<<20)+(8<<20); m.Contents=nil; m.Key=nil; m.Value=nil}; m.Pinning=0; if m.MaxEntries>100000{m.MaxEntries=1024} }
 for n:=range spec.Programs{
  s2:=spec.Copy()
  for o:=range s2.Programs{ if o!=n {delete(s2.Programs,o)}}
  a:=time.Now()
  c,err:=ebpf.NewCollectionWithOptions(s2,ebpf.CollectionOptions{Programs:ebpf.ProgramOptions{LogLevel:ebpf.LogLevelStats}})
  if err!=nil{fmt.Printf("%s %+v\n",n,err);continue}
  p:=c.Programs[n]
  i:=strings.Index(p.VerifierLog,"processed")
  fmt.Println(n,time.Since(a),p.VerifierLog[i:min(len(p.VerifierLog),i+200)])
 }
}
